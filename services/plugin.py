"""What vLLM calls in each of its processes: an entry point of the group ``vllm.general_plugins``.

With ``tensor_parallel_size`` above 1 an engine's model runs in processes that vLLM starts.  They know nothing
of what was registered in the stage's own.
"""

from vllm.model_executor.models import ModelRegistry

from services.families.known import FAMILIES
from shared.vllm.platform import architecture_of


def register_models() -> None:
    """Tell vLLM where the models of all families are; none of them is loaded."""
    for family in FAMILIES.values():
        for path in family.models:
            architecture = architecture_of(path.rpartition(":")[2])
            # A stage's own process has registered the class itself, which vLLM need not look for.
            if architecture not in ModelRegistry.models:
                ModelRegistry.register_model(architecture, path)
