"""``python -m tests.family.run STAGE --config FILE`` runs a stage that knows a second model family."""

import sys
from types import MappingProxyType

from services.families.family import Families
from services.families.known import FAMILIES
from services.talker.__main__ import main as talker
from services.thinker.__main__ import main as thinker
from services.token2wav.__main__ import main as token2wav
from tests.family.small import SMALL

MAINS = {"thinker": thinker, "talker": talker, "token2wav": token2wav}

if __name__ == "__main__":
    families: Families = MappingProxyType({**FAMILIES, SMALL.model_type: SMALL})
    MAINS[sys.argv.pop(1)](families)
