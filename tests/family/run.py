"""``python -m tests.family.run PROCESS --config FILE`` runs a process that knows a second model family."""

import sys
from functools import partial
from types import MappingProxyType

from gateway.__main__ import main as gateway
from services.families.family import Families
from services.families.known import FAMILIES
from services.talker.__main__ import main as talker
from services.thinker.__main__ import main as thinker
from services.token2wav.__main__ import main as token2wav
from shared.ending import run_to_end
from shared.families.known import DESCRIPTIONS
from tests.family.small import DESCRIPTION, SMALL

MAINS = {"thinker": thinker, "talker": talker, "token2wav": token2wav}

if __name__ == "__main__":
    name = sys.argv.pop(1)
    if name == "gateway":
        run_to_end(partial(gateway, {**DESCRIPTIONS, DESCRIPTION.model_type: DESCRIPTION}))
    families: Families = MappingProxyType({**FAMILIES, SMALL.model_type: SMALL})
    MAINS[name](families)
