"""The model card: what the speaking checkpoint is, what it cannot do, and how good it is."""

import json
from pathlib import Path

from labs.training.data import world
from labs.training.data.corpus import VOICES
from labs.training.data.hearing import UNHEARD

FIGURES_FILE = "figures.json"
NOTES_FILE = "notes.md"
"""What was done otherwise than the recipe says, in the state's directory; need not be there."""

_CARD = """\
# A very small speaking checkpoint

About 13 million parameters in the architecture and file layout of Qwen2.5-Omni, trained from nothing by
this project. It exists to show and to test the server: it reads, hears, sees and speaks, but only of a
tiny world.

## What it knows

{words} English words: {vocabulary}.

- Calculations with numbers up to a hundred, and going on from a result ("what is seven plus five", "and
  plus one").
- Drawn circles, squares, triangles and stars: colour, size, count up to nine, place; one thing, some
  alike, or two.
- Small talk, counting, repeating digits.  To everything else it answers "{unknown}".
- Questions may be typed or spoken.  Voices: {voices}.

## What it cannot do

It knows no other words, photographs, videos or languages. It was trained on synthetic voices alone, and
hears people badly. It has no knowledge and no judgement.

## Data and licences

Everything was made on the spot: sentences from rules, images by drawing, speech by flite (voices slt and
rms of CMU Arctic, under CMU Flite's permissive licence; hearing also kal and kal16) and, for hearing only,
espeak-ng. No weights and no data sets of others were used. Voices never trained on, for measuring:
{unheard}.

## How it was made

`python -m labs.training --state DIR`: codec ids by k-means over pairs of mel frames; a BigVGAN
trained by multi-resolution spectra; the DiT by flow matching; the thinker by cross-entropy, its encoders
also on the words that are said and the things that are shown; the talker on the frozen thinker's
conditioning rows. Seeds are fixed; about ten core-hours on a CPU.
{notes}
## Figures

{figures}
"""


def model_card(state: Path) -> str:
    """Return the card, with the figures that the evaluation left in ``state``."""
    notes = state / NOTES_FILE
    return _CARD.format(
        words=len(world.vocabulary()),
        vocabulary=" ".join(world.vocabulary()),
        unknown=world.UNKNOWN,
        voices=", ".join(VOICES),
        unheard=", ".join(f"{voice.name} ({voice.program})" for voice in UNHEARD),
        figures=_table(state / FIGURES_FILE),
        notes=f"\n{notes.read_text(encoding='utf-8').strip()}\n" if notes.is_file() else "",
    )


def _table(path: Path) -> str:
    if not path.is_file():
        return "Not measured yet."
    figures = json.loads(path.read_text(encoding="utf-8"))
    rows = "\n".join(f"| {name} | {value} |" for name, value in figures.items())
    return f"| what | held-out cases |\n|---|--:|\n{rows}"
