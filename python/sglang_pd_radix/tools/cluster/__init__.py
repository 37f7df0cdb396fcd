"""A prefill/decode deployment on this machine as one object, which ends with its owner.

    with Cluster("model", decode_args=["--disaggregation-decode-enable-radix-cache"]) as cluster:
        requests.post(cluster.router_url + "/generate", json=...)

Every server runs in a session of its own, so Ctrl-C in the terminal reaches only the owner, which then ends each
process group. A watchdog process holds the other end of a pipe: if the owner is killed, the pipe closes and the
watchdog ends the rest.

`spec` describes a deployment, `plan` makes processes of it (with `options`, `ports`, `devices`, `gateway`), `process`
runs and ends them, `startup` waits until they serve (with `logs` and `local_http`), `deployment` combines all.
"""

from .deployment import STOP_GRACE_S, Cluster
from .devices import aggregated_on, compared_on, cpu_env, cpu_options, gpu_count, gpu_placement
from .gateway import GATEWAYS, SGLANG_ROUTER, SMG, Gateway, add_router_option, named_gateway
from .gateway import options as gateway_options
from .local_http import http, local_session
from .logs import current_phase, describe_exit, failure_reason, log_tail
from .options import (
    ATTENTION_OPTIONS,
    HOST,
    OWNED_OPTIONS,
    RADIX_FLAG,
    has_option,
    option_value,
    per_worker,
    ports_named,
    with_defaults,
)
from .ports import DP_ATTENTION_OFFSETS, free_ports
from .process import Process, Progress
from .spec import Spec

__all__ = [
    "ATTENTION_OPTIONS",
    "DP_ATTENTION_OFFSETS",
    "GATEWAYS",
    "HOST",
    "OWNED_OPTIONS",
    "RADIX_FLAG",
    "SGLANG_ROUTER",
    "SMG",
    "STOP_GRACE_S",
    "Cluster",
    "Gateway",
    "Process",
    "Progress",
    "Spec",
    "add_router_option",
    "aggregated_on",
    "compared_on",
    "cpu_env",
    "cpu_options",
    "current_phase",
    "describe_exit",
    "failure_reason",
    "free_ports",
    "gateway_options",
    "gpu_count",
    "gpu_placement",
    "has_option",
    "http",
    "local_session",
    "log_tail",
    "named_gateway",
    "option_value",
    "per_worker",
    "ports_named",
    "with_defaults",
]
