"""The commands' way into a Ray cluster."""

import logging
import os
from collections.abc import Iterator
from contextlib import contextmanager
from typing import Any, Final

from omnirelay.errors import ClusterError, MissingPackageError
from ops.cluster.keys import KeyFiles
from ops.cluster.plan import CONTROLLER, NAMESPACE

ANSWER_S: Final = 60.0
"""How long the controller may take to answer: it may have to come back on another node."""


@contextmanager
def connected(address: str | None) -> Iterator["Cluster"]:
    """Connect to a Ray cluster while the block runs.

    Args:
        address: HOST:PORT of its head; None for ``RAY_ADDRESS``, or the cluster of this machine.

    Raises:
        MissingPackageError: Ray is not installed.
        ClusterError: There is no cluster.
    """
    # Else Ray reports that it is used to its makers.
    os.environ.setdefault("RAY_USAGE_STATS_ENABLED", "0")
    try:
        import ray  # noqa: PLC0415 - an extra of the server
    except ImportError as error:
        raise MissingPackageError("ray", "cluster", "omnirelay-server") from error
    where = address or os.environ.get("RAY_ADDRESS") or "auto"
    try:
        ray.init(where, namespace=NAMESPACE, log_to_driver=False, logging_level=logging.ERROR)
    except (ConnectionError, ValueError, RuntimeError) as error:
        place = "on this machine" if where == "auto" else f"at {where}"
        raise ClusterError(
            f"no Ray cluster answers {place}: start one with `ray start --head`, and use this command on one "
            "of its nodes"
        ) from error
    try:
        yield Cluster(ray)
    finally:
        ray.shutdown()


class Cluster:
    """A Ray cluster, with our stack or without.

    Args:
        ray: The package, connected.
    """

    def __init__(self, ray: Any) -> None:
        self._ray = ray

    def create(self, settings: str, keys: KeyFiles) -> None:
        """Create the controller, and let it start all processes.

        Raises:
            ClusterError: There is a stack already, or Ray cannot place a process; then nothing is left of it.
        """
        from ops.cluster.controller import ACTOR, Controller  # noqa: PLC0415 - loads Ray

        gpus_there = self._ray.cluster_resources().get("GPU", 0) > 0
        try:
            options = self._ray.remote(Controller).options(
                name=CONTROLLER, num_cpus=0, max_task_retries=-1, **ACTOR
            )
            controller = options.remote(settings, keys, gpus_there)
        except ValueError as error:
            raise ClusterError(
                "this Ray cluster already runs a stack: `omnirelay cluster down` stops it"
            ) from error
        try:
            self._ray.get(controller.start.remote())
        except (ValueError, KeyboardInterrupt) as error:
            # It would go on without this command.
            self.stop()
            if isinstance(error, ValueError):
                raise ClusterError(f"Ray cannot place the stack: {getattr(error, 'cause', error)}") from error
            raise

    def stop(self) -> None:
        """Let all processes finish their requests and end, and the controller."""
        self.call("stop", within_s=None)
        self._ray.kill(self._controller(), no_restart=True)

    def _controller(self) -> Any:
        try:
            return self._ray.get_actor(CONTROLLER)
        except ValueError as error:
            raise ClusterError(
                "this Ray cluster runs no stack: `omnirelay cluster up --config FILE` starts one"
            ) from error

    def call(self, method: str, *arguments: Any, within_s: float | None = ANSWER_S) -> Any:
        """Call a method of :class:`ops.cluster.controller.Controller`.

        Raises:
            ClusterError: There is no stack, or its controller does not answer.
        """
        try:
            return self._ray.get(getattr(self._controller(), method).remote(*arguments), timeout=within_s)
        except (self._ray.exceptions.RayActorError, self._ray.exceptions.GetTimeoutError) as error:
            raise ClusterError(
                "the stack's controller does not answer; Ray starts it again elsewhere if its node is gone"
            ) from error
