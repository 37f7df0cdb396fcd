"""A decode-side prefix cache for prefill/decode disaggregation in SGLang 0.5.10.post1.

Importing this package costs nothing and changes nothing: ``patching.boot``, started by ``sglang_pd_radix.pth``, does
the work.
"""

__version__ = "0.1.0"
