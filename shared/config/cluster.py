"""The cluster section of the configuration: what each process needs of a node, and how many there may be."""

from typing import Annotated, Self

from pydantic import Field, model_validator

from shared.config.values import Bytes, Section
from shared.messages import MAX_REPLICAS

Amount = Annotated[float, Field(gt=0)]
ResourceName = Annotated[str, Field(min_length=1, max_length=128)]


class ProcessPlace(Section):
    """What one process needs of the node it runs on.

    Attributes:
        cpus: CPUs of each gateway, or replica of the stage.  Default: ``stages.STAGE.threads``, or 1.
        memory_bytes: Memory of it, in Ray's account.  Default: none.
        resources: Custom resources of Ray that its node must have, like ``{edge: 1.0}``.
    """

    cpus: Amount | None = None
    memory_bytes: Bytes | None = None
    resources: dict[ResourceName, Amount] = Field(default_factory=dict, max_length=100)


class StagePlace(ProcessPlace):
    """What each replica of a stage needs of its node, and between which numbers the stage is scaled.

    Attributes:
        gpus: GPUs of a replica: 0, or ``engine.tensor_parallel_size`` (token2wav: 1), the default where the
            cluster has GPUs.
        min_replicas: Fewest replicas under the scaling rule. See docs/cluster.md#scaling.
        max_replicas: Most replicas. Default: the rule does not scale the stage.
    """

    gpus: Annotated[int, Field(ge=0)] | None = None
    min_replicas: Annotated[int, Field(gt=0, le=MAX_REPLICAS)] = 1
    max_replicas: Annotated[int, Field(gt=0, le=MAX_REPLICAS)] | None = None

    @model_validator(mode="after")
    def _bounds_in_order(self) -> Self:
        if self.max_replicas is not None and self.max_replicas < self.min_replicas:
            raise ValueError("max_replicas must not be below min_replicas")
        return self


class ClusterConfig(Section):
    """How ``omnirelay cluster`` places and scales the processes.

    Attributes:
        scale_up_after_s: How long a stage must be short before it gets a replica.
        scale_down_after_s: How long it must have too many before one ends.
    """

    scale_up_after_s: Annotated[float, Field(gt=0)] = 10.0
    scale_down_after_s: Annotated[float, Field(gt=0)] = 300.0
    gateway: ProcessPlace = ProcessPlace()
    thinker: StagePlace = StagePlace()
    talker: StagePlace = StagePlace()
    token2wav: StagePlace = StagePlace()
