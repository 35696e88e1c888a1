"""A worker's settings, checked when they are made, and the sizes of the models."""

from dataclasses import dataclass
from pathlib import Path

from forebay.errors import UsageError
from forebay.load.arguments import check_choice
from forebay.order.step_index import check_integer
from forebay.worker.catalog import CatalogEntry, find_entry
from forebay.worker.trainer import check_trainer

# Measured in F32 without recomputation: 16 bytes a parameter for weights, gradients and AdamW's two moments; a token
# takes 17 vectors a layer, and its logits, their softmax and their gradient.


@dataclass(frozen=True)
class Size:
    """The shape of a GPT, and a batch size to begin with."""

    width: int
    num_layers: int
    num_heads: int
    batch_size: int

    def num_parameters(self, vocab_size: int, seq_len: int) -> int:
        """Weights, tied embeddings counted once."""
        layer = 12 * self.width**2 + 13 * self.width
        return (vocab_size + seq_len + 2) * self.width + self.num_layers * layer

    def state_bytes(self, vocab_size: int, seq_len: int) -> int:
        """Memory of training that does not depend on the batch."""
        return 16 * self.num_parameters(vocab_size, seq_len)

    def sample_bytes(self, vocab_size: int, seq_len: int) -> int:
        """Memory of each sample of a batch that is learnt in one pass."""
        return 4 * seq_len * (17 * self.num_layers * self.width + 4 * self.width + 3 * vocab_size)

    def largest_batch(self, vocab_size: int, seq_len: int, num_bytes: int) -> int:
        """The largest batch whose training fits `num_bytes` of memory; 0 if no sample does."""
        available = num_bytes - self.state_bytes(vocab_size, seq_len)
        return max(0, available // self.sample_bytes(vocab_size, seq_len))


SIZES = {"tiny": Size(128, 3, 4, 32), "small": Size(384, 6, 6, 16), "medium": Size(768, 12, 12, 4)}


DATASET_TYPES = ("dummy", "distributed_dummy", "huggingface")


class _Default(int):
    """A default value, which a dataset's own replaces; equal to its number."""


@dataclass(frozen=True)
class WorkerConfig:
    """The settings of a worker. Fields that are None take the dataset's, or the environment's value.

    UsageError if a value is out of range.

    Args: (in parentheses what holds where a value is not given)
        dataset_type: "dummy" (random ids), "distributed_dummy" (random ids of a finite set, permuted and dealt to
            ranks) or "huggingface" (text). A dataset_name makes a dummy "huggingface".
        dataset_name: A short name of the catalogue, the hub's OWNER/NAME[/CONFIG][:SPLIT], or a path of text files.
        tokenizer_name: In place of the dataset's own.
        batch_size: Samples of this worker's step (4).
        seq_len: Tokens of a sample (the dataset's own, and 32 for dummies).
        num_steps: Steps of the run (100).
        model_size: "tiny", "small" or "medium": of the GPT that is trained, or of the model of your `trainer`. Without
            it tokens are counted, unless learning_rate, device or trainer is given: then it is "tiny".
        worker_id: Identifies this worker to the coordinator, also after a restart (generated).
        coordinator: "host:port" or an http(s) URL (the environment's FOREBAY_COORDINATOR, or 127.0.0.1:8000).
        identity: This node's directory (`forebay network join`), for a coordinator with mutual TLS (plain HTTP).
        seed: Of data, dummies and the model's first weights (42).
        streaming: Whether text is streamed, or kept on this machine first (streamed if above 10 GB).
        shuffle_buffer: Documents that are mixed (the dataset's own).
        text_key: The column with the text (the dataset's own).
        learning_rate: AdamW's (0.001).
        trainer: "gpt" (needs PyTorch), "count" (NumPy: which token follows which), or FILE.py:NAME, a class of your
            program ("gpt" if model_size, learning_rate or device is given, else "count").
        device: Of the model, such as "cuda" (the accelerator if there is one).
        timeout_s: How long to wait for a coordinator or a peer that does not respond (60).
    """

    dataset_type: str = "dummy"
    dataset_name: str | None = None
    tokenizer_name: str | None = None
    batch_size: int = 4
    seq_len: int = _Default(32)
    num_steps: int = 100
    model_size: str | None = None
    worker_id: str | None = None
    coordinator: str | None = None
    identity: str | Path | None = None
    seed: int = 42
    streaming: bool | None = None
    shuffle_buffer: int | None = None
    text_key: str | None = None
    learning_rate: float | None = None
    trainer: str | None = None
    device: str | None = None
    timeout_s: float = 60.0

    def __post_init__(self) -> None:
        check_choice("dataset_type", self.dataset_type, DATASET_TYPES)
        check_choice("model_size", self.model_size, (None, *SIZES))
        check_trainer(self.resolved_trainer())
        check_choice("streaming", self.streaming, (None, True, False))
        for name in ("batch_size", "seq_len", "num_steps"):
            if getattr(self, name) is None:
                raise UsageError(f"{name}: expected an integer from 1, got None. Leave it out for its default.")
            check_integer(name, getattr(self, name), 1)
        check_integer("shuffle_buffer", self.shuffle_buffer, 0)
        for name in ("learning_rate", "timeout_s"):
            if (value := getattr(self, name)) is not None and not value > 0:
                raise UsageError(f"{name}: expected a number above 0, got {value!r}.")
        if self.worker_id is not None and not self.worker_id.strip():
            raise UsageError("worker_id: expected a name, got an empty one. Leave it out: one is generated.")
        if self.dataset_name is not None and self.dataset_type == "dummy":
            object.__setattr__(self, "dataset_type", "huggingface")
        if (self.dataset_name is None) == (self.dataset_type == "huggingface"):
            raise UsageError(
                f"dataset_name: expected one with dataset_type 'huggingface' and none with dummies, got "
                f"{self.dataset_name!r} with {self.dataset_type!r}. list_available_datasets() has names."
            )

    @property
    def entry(self) -> CatalogEntry | None:
        """The dataset's entry of the catalogue; None for dummies. UnknownDatasetError for an unknown name."""
        return None if self.dataset_name is None else find_entry(self.dataset_name)

    @property
    def seq_len_is_given(self) -> bool:
        """Whether seq_len is not the default."""
        return not isinstance(self.seq_len, _Default)

    def resolved_seq_len(self) -> int:
        """The given seq_len, else the dataset's own, else 32."""
        entry = None if self.seq_len_is_given else self.entry
        return int(self.seq_len) if entry is None else entry.seq_len

    def resolved_trainer(self) -> str:
        """The trainer's name: the given one, else that of a model if one of its settings is given."""
        has_model = (self.model_size, self.learning_rate, self.device) != (None,) * 3
        return self.trainer or ("gpt" if has_model else "count")

    def effective_batch_size(self, world_size: int) -> int:
        """Samples of a step over all workers: batch_size x world_size."""
        check_integer("world_size", world_size, 1)
        return self.batch_size * world_size
