"""`manifest`: Ray Serve's config for replicas of a server. There is no Ray here."""

from __future__ import annotations

import math
from collections.abc import Mapping, Sequence
from dataclasses import dataclass
from typing import Any

from specpool.checks import check_int, shown
from specpool.engine.config import MOST_BATCH, SERVED_BATCH
from specpool.errors import ConfigError
from specpool.serve.config import Launch

#: What Serve imports to build the application.
IMPORT_PATH = "specpool.cli.deploy:application"
ROUTER = "specpool.serve.replicas.router:SessionOwnerRouter"
#: Requests beside texts, such as `/health`, that a replica has room for.
_NUM_OTHER_REQUESTS = 64
#: Seconds between two health checks.
_PERIOD = 5.0
#: Seconds that Serve waits for a replica's last request, if requests may take for ever.
_LONGEST = 3600.0
#: Seconds that a replica that leaves may take to move its sessions.
LONGEST_MOVES = 60.0


@dataclass(frozen=True, slots=True, kw_only=True)
class ReplicaConfig:
    """How many replicas there are, and what each of them has.

    Attributes:
        app: the application's name in the cluster.
        min_replicas: the fewest replicas.
        max_replicas: the most; if it is above `min_replicas`, Serve follows the load.
        gpus: GPUs of a replica.
        cpus: CPU cores of a replica.
        stuck_timeout: seconds after which an engine that does not answer is killed.
        ranks: processes of a replica that share the target, all on one node.
    """

    app: str = "specpool"
    min_replicas: int = 1
    max_replicas: int = 1
    gpus: float = 0.0
    cpus: float = 1.0
    stuck_timeout: float = 60.0
    ranks: int = 1

    def __post_init__(self) -> None:
        check_int("min_replicas", self.min_replicas, 1, 1 << 16)
        check_int("max_replicas", self.max_replicas, self.min_replicas, 1 << 16)
        check_int("ranks", self.ranks, 1, 64)
        if not self.app or not self.app.replace("-", "").replace("_", "").isalnum():
            raise ConfigError(f"app must be letters, digits, - and _, got {shown(self.app)}")
        for name, limit in (("gpus", 64), ("cpus", 1024), ("stuck_timeout", 86400)):
            value = getattr(self, name)
            low = name == "stuck_timeout"
            if not math.isfinite(value) or not (0 < value if low else 0 <= value) or value > limit:
                kind = "above 0" if low else "0 or more"
                raise ConfigError(f"{name} must be {kind} and at most {limit}, got {value!r}")


def manifest(config: ReplicaConfig, launch: Launch, words: Sequence[str]) -> dict[str, Any]:
    """Return the config, as `serve deploy` and KubeRay take it.

    Args:
        config: the replicas.
        launch: what these words make.
        words: the options of `specpool serve`.

    Raises:
        ConfigError: the device needs GPUs that the replicas do not have.
    """
    server = launch.config
    on_cuda = str(launch.loading["device"]).startswith("cuda")
    if on_cuda and not config.gpus:
        raise ConfigError("gpus must be above 0 for --device cuda, got 0: Ray hides them then")
    if on_cuda and config.ranks > 1 and config.gpus != config.ranks:
        raise ConfigError(
            f"gpus must be {config.ranks} for {config.ranks} ranks, a GPU each, got {config.gpus:g}"
        )
    drain = server.request_timeout or _LONGEST
    sizes = launch.loading.get("graph_sizes") or (0,)
    deployment: dict[str, Any] = {
        "name": "Replica",
        # More than the server takes, so that its own 429 answers, and no turn waits in a router.
        "max_ongoing_requests": launch.loading.get("max_batch", max(MOST_BATCH, *sizes))
        + server.max_queue
        + _NUM_OTHER_REQUESTS,
        "max_queued_requests": -1,
        # A replica that leaves first lets its requests end, and then moves its sessions.
        "graceful_shutdown_timeout_s": drain + LONGEST_MOVES + 10.0,
        "graceful_shutdown_wait_loop_s": 0.5,
        "health_check_period_s": _PERIOD,
        "health_check_timeout_s": config.stuck_timeout + 10.0,
        "ray_actor_options": {"num_cpus": config.cpus, "num_gpus": config.gpus},
        "request_router_config": {"request_router_class": ROUTER},
    }
    if config.max_replicas > config.min_replicas:
        deployment["autoscaling_config"] = {
            "min_replicas": config.min_replicas,
            "max_replicas": config.max_replicas,
            "target_ongoing_requests": launch.loading.get("max_batch", SERVED_BATCH),
        }
    else:
        deployment["num_replicas"] = config.min_replicas
    return {
        "proxy_location": "EveryNode",
        "http_options": {"host": server.host, "port": server.port},
        "applications": [
            {
                "name": config.app,
                "route_prefix": "/",
                "import_path": IMPORT_PATH,
                "args": {
                    "serve": [*words],
                    "stuck_timeout": config.stuck_timeout,
                    "ranks": config.ranks,
                },
                "deployments": [deployment],
            }
        ],
    }


def args_of(args: Mapping[str, Any]) -> tuple[list[str], float, int]:
    """Return the words, the timeout and the number of ranks of an application's `args`.

    Raises:
        ConfigError: they have another form.
    """
    words, seconds = args.get("serve", []), args.get("stuck_timeout", 60.0)
    ranks = args.get("ranks", 1)
    unknown = sorted(set(args) - {"serve", "stuck_timeout", "ranks"})
    if unknown:
        raise ConfigError(
            f"args has no field {shown(unknown[0])}: it has serve, stuck_timeout and ranks"
        )
    if not isinstance(words, list) or not all(isinstance(word, str) for word in words):
        raise ConfigError("args.serve must be a list of texts, the options of `specpool serve`")
    if not isinstance(seconds, int | float) or not 0 < seconds < math.inf:
        raise ConfigError(f"args.stuck_timeout must be seconds above 0, got {shown(seconds)}")
    check_int("args.ranks", ranks, 1, 64)
    return words, float(seconds), ranks
