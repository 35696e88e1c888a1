"""No text of another person runs code: recipes, settings of a run and manifests name it in vain."""

import ast
import sys
from pathlib import Path

import pytest

import forebay
from forebay.errors import UsageError
from forebay.prepare.config import load_recipe
from forebay.worker.hub_data import create_huggingface_dataset

CODE = "strange_code:Stage"
RECIPES = {
    "the name of a method of deduplication": f'[dedup."{CODE}"]\nx = 1\n',
    "its use": f'[dedup.x]\nuse = "{CODE}"\n',
    "the name of a stage": f'[["{CODE}"]]\nx = 1\n[["{CODE}"]]\nuse = "x"\n',
    "the use of a stage": f'[x]\nuse = "{CODE}"\n',
    "the use of a built-in stage": f'[c4]\nuse = "{CODE}"\n',
    "a list": f'[x]\nuse = ["{CODE}"]\n',
    "a scorer": f'[score.x]\nuse = "{CODE}"\n',
    "the name of a score": f'[score."{CODE}"]\nuse = "{CODE}"\n',
    "a tokenizer": f'[tokenize]\ntokenizer = "{CODE}"\n',
    "an extractor": f'[extract]\nextractor = "{CODE}"\n',
}
LOADERS = {
    "plugins.py": {"import_module", "load"},  # the gate
    "worker/training.py": {"exec_module", "spec_from_file_location"},  # --trainer of the worker's own command line
    "__init__.py": {"import_module"}, "prepare/__init__.py": {"import_module"}, "worker/__init__.py": {"import_module"},
    "prepare/extract/extractors.py": {"import_module"}, "processes.py": {"exec"}, "prepare/results.py": {"eval"},
}  # fmt: skip
"""The calls that import or run a text, by file; all but the first two have texts of Forebay's own source."""


@pytest.fixture
def strange(tmp_path, monkeypatch) -> Path:
    (tmp_path / "strange_code.py").write_text("raise SystemExit('it ran')\n")
    monkeypatch.syspath_prepend(tmp_path)
    return tmp_path


@pytest.mark.parametrize("how", RECIPES)
def test_a_recipe_names_code_in_vain(strange, how):
    (strange / "recipe.toml").write_text(RECIPES[how])
    with pytest.raises(UsageError, match=r"recipe\.toml"):
        load_recipe(config=strange / "recipe.toml")
    assert "strange_code" not in sys.modules


def test_the_settings_of_a_run_name_code_in_vain(strange):
    (strange / "text.txt").write_text("a text\n")
    with pytest.raises(UsageError, match="names code"):  # a coordinator's tokenizer_name is the setting of each worker
        create_huggingface_dataset(str(strange / "text.txt"), tokenizer_name=CODE)


def test_nothing_but_the_gate_loads_what_a_text_names():
    root = Path(forebay.__file__).parent
    named = {"import_module", "__import__", "exec", "eval", "exec_module", "spec_from_file_location", "run_path"}
    for path in root.rglob("*.py"):
        calls = [node.func for node in ast.walk(ast.parse(path.read_text())) if isinstance(node, ast.Call)]
        names = {getattr(call, "id", getattr(call, "attr", "")) for call in calls if isinstance(call, ast.Name)}
        names |= {c.attr for c in calls if isinstance(c, ast.Attribute) and c.attr in named - {"exec", "eval"}}
        assert names & named <= LOADERS.get(path.relative_to(root).as_posix(), set()), path
