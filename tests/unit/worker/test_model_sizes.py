"""The memory that training takes: the figures are those of the model, and no proposed batch is too large."""

import pytest

from forebay.cli import main
from forebay.worker.config import SIZES

torch = pytest.importorskip("torch")

from forebay.worker.gpt import Gpt  # noqa: E402


@pytest.mark.parametrize("name", ["tiny", "small"])
def test_the_bound_holds_and_is_near(name):
    """Beside what autograd saves for the way back, for two shapes of a batch."""
    size, vocab_size, seq_len = SIZES[name], 300, 32
    model = Gpt(vocab_size, seq_len, size)
    assert size.num_parameters(vocab_size, seq_len) == sum(item.numel() for item in model.parameters())
    weights = {item.untyped_storage().data_ptr() for item in model.parameters()}
    for batch in (1, 3):
        saved = _saved_bytes(model, weights, torch.zeros(batch, seq_len, dtype=torch.int64))
        bound = batch * size.sample_bytes(vocab_size, seq_len)
        gradient = 4 * batch * seq_len * vocab_size
        assert 0.7 * bound < saved + gradient <= bound


def _saved_bytes(model, weights, ids):
    """Bytes that autograd keeps of a step's way there, weights apart."""
    current = []  # So that no two tensors have had one address.
    saved = {}

    def keep(tensor):
        current.append(tensor)
        storage = tensor.untyped_storage()
        if storage.data_ptr() not in weights:
            saved[storage.data_ptr()] = storage.nbytes()
        return tensor

    with torch.autograd.graph.saved_tensors_hooks(keep, lambda tensor: tensor):
        torch.nn.functional.cross_entropy(model(ids).flatten(0, 1), ids.flatten())
    return sum(saved.values())


def test_the_command_proposes_what_fits(capsys):
    """By the guide 32 for tiny, 4 for medium; fewer where fewer fit; refused where none does."""
    for name, memory, proposed in (("tiny", "80GB", 32), ("medium", "24GB", 4), ("medium", "5GB", 2)):
        assert main(f"plan --model-size {name} --seq-len 1024 --memory {memory}".split()) == 0
        assert f"batch_size={proposed}" in capsys.readouterr().out
    assert main(["plan", "--model-size", "medium", "--seq-len", "1024", "--memory", "2GB"]) == 1
    assert "one sample" in capsys.readouterr().out
