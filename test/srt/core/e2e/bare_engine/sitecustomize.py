"""For workers of the tests that run without the patch set: with SGLANG_PD_RADIX=0, only what a CPU host needs."""

from sglang_pd_radix.supplied import cpu_host

cpu_host.install()
