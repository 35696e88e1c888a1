"""The recipe: everything that decides the bytes of a dataset. Each table of its file is a frozen dataclass here."""

from dataclasses import dataclass, field, fields
from typing import Annotated, Literal

from pydantic import Field

from forebay.base import Json
from forebay.formats.inputs import ReadOptions
from forebay.prepare.dedup.methods import Dedup
from forebay.prepare.documents import Stage, without_paths
from forebay.prepare.engines.sandbox import Limits
from forebay.prepare.settings import Code, Positive, Settings, Share, plain
from forebay.prepare.tasks.slicing import MIN_SLICE_BYTES
from forebay.prepare.tokenize.renderings import TEMPLATES, Conversations, FillInTheMiddle, Template

STAGES = {
    "extract": "forebay.prepare.extract.extractors:Extract",
    "unicode": "forebay.prepare.clean.unicode:Unicode",
    "pii": "forebay.prepare.clean.pii:Pii",
    "toxic": "forebay.prepare.clean.toxic:Toxic",
    "boilerplate": "forebay.prepare.clean.boilerplate:Boilerplate",
    "url": "forebay.prepare.filters.url:Url",
    "length": "forebay.prepare.filters.quality:Length",
    "gopher_quality": "forebay.prepare.filters.quality:GopherQuality",
    "gopher_repetition": "forebay.prepare.filters.quality:GopherRepetition",
    "c4": "forebay.prepare.filters.c4:C4",
    "lines": "forebay.prepare.filters.lines:LineRules",
    "fineweb": "forebay.prepare.filters.quality:FineWeb",
    "code": "forebay.prepare.filters.code:Code",
    "language": "forebay.prepare.filters.language:Language",
    "perplexity": "forebay.prepare.filters.perplexity:Perplexity",
    "decontaminate": "forebay.prepare.decontaminate:Decontaminate",
    "select": "forebay.prepare.scores.columns:Select",
    "subset": "forebay.prepare.scores.columns:Subset",
    "repeat": "forebay.prepare.scores.columns:Repeat",
}
"""The stages that come with Forebay; entry points of `forebay.filters` are used by their names, too."""
GROUPS = {"gopher": ("gopher_repetition", "gopher_quality")}  # Names that `--filter` accepts for several stages.


@dataclass(frozen=True)
class Tokenize(Settings):
    """`[tokenize]`: which tokenizer, and the tokens between documents.

    Args:
        tokenizer: A tokenizer.json, a directory, a hub name, `bytes`, `train:VOCAB`, the name of an entry point of
            `forebay.tokenizers`, or `module:Name`.
        eos, bos: Whether the tokenizer's own end and beginning of text stand after and before each document, or the
            name of the token that does. `auto`: if the vocabulary has one.
    """

    tokenizer: Code = ""
    eos: bool | str = "auto"
    bos: bool | str = False


@dataclass(frozen=True)
class Slicing(Settings):
    """`[slice]`: the size of slices and the order of documents in them.

    Args:
        bytes: No slice file is larger; all but the last of each 2^33 tokens are within 1 % of it, 64 KiB and up.
        tokens, rows: Tokens (or rows, with `[rows]`) in each slice but those last ones, instead of a size in bytes.
        shuffle: Documents are permuted over the whole dataset before they are cut into slices.
        seed: Of the permutation, and of the sample that `train:` learns from.
    """

    bytes: Annotated[int, Field(ge=MIN_SLICE_BYTES)] = 64 << 20
    tokens: Positive | None = None
    rows: Positive | None = None
    shuffle: bool = False
    seed: int = 0


@dataclass(frozen=True)
class Rows(Settings):
    """`[rows]`: conversations to rows of one length, for fine-tuning, in place of a stream of tokens.

    Args:
        max_tokens: The length of a row.
        template: The text around turns: `plain`, `chatml`, or the file of a chat template: Jinja, or a
            tokenizer_config.json. Only what it writes for the assistant is trained on.
        too_long: A longer conversation is `cut` at its end, or `drop`ped.
        packed: Several whole conversations share a row, told apart by `position_ids` and `segment_ids`.
    """

    max_tokens: Annotated[int, Field(ge=2)] = 2048
    template: str = "plain"
    too_long: Literal["cut", "drop"] = "cut"
    labels: str = field(default="I64", init=False)  # As PyTorch expects it.
    packed: bool = False

    def conversations(self) -> Conversations:
        if self.template in TEMPLATES:
            return Conversations(self.max_tokens, TEMPLATES[self.template], self.too_long)
        return Conversations(self.max_tokens, Template(), self.too_long, self._chat_template())

    def to_json(self) -> Json:
        """The settings with the template itself in place of its path."""
        template = self.template if self.template in TEMPLATES else self._chat_template()
        return {**{item.name: getattr(self, item.name) for item in fields(self)}, "template": template}

    def _chat_template(self) -> str:
        from forebay.prepare.tokenize.chat_template import load_chat_template

        return load_chat_template(self.template)


@dataclass(frozen=True)
class Recipe(Settings):
    """All that decides the bytes of a dataset.

    Args:
        inputs: What is read if the command line names none.
        name: Of the dataset; by default that of its directory.
        max_error_rate: The run fails if more than this share of the documents is malformed.
        sample: Share of the input that is read, evenly out of all of it.
    """

    inputs: tuple[str, ...] = ()
    name: str = ""
    max_error_rate: Share = 0.05
    sample: Annotated[float, Field(gt=0, le=1)] = 1.0
    read: ReadOptions = field(default_factory=ReadOptions)
    limits: Limits = field(default_factory=Limits)
    stages: tuple[Stage, ...] = ()
    dedup: Dedup = field(default_factory=Dedup)
    tokenize: Tokenize = field(default_factory=Tokenize)
    slice: Slicing = field(default_factory=Slicing)
    rows: Rows | None = None
    fim: FillInTheMiddle | None = None

    def __post_init__(self) -> None:
        super().__post_init__()
        if self.rows is not None and self.rows.template not in TEMPLATES:
            object.__setattr__(self, "read", self.read.with_roles())

    def to_json(self) -> Json:
        """Every setting, defaults too, as the lineage has it: `stages` is a list of [name, settings]."""
        names = [f.name for f in fields(self) if f.name not in ("inputs", "stages", "fim")]
        settings = {name: plain(getattr(self, name)) for name in names}
        own = settings["dedup"].pop("own")
        if own:
            settings["dedup"]["own"] = [[m.name, m.settings] for m in self.dedup.own]
        if self.rows is not None:
            settings["rows"] = self.rows.to_json()
        if self.fim is not None:
            settings["fim"] = plain(self.fim)
        return {**settings, "stages": [[s.name, plain(without_paths(s))] for s in self.stages]}
