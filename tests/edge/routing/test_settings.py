"""Settings: defaults < YAML < environment < argument, and the exact words of each error."""

import contextlib
import os
import re
import threading
from concurrent.futures import ThreadPoolExecutor
from pathlib import Path

import pytest
import torch

import nsa
import nsa.kernels
import nsa.settings as settings
from nsa import gpu, routing

BASE = str(Path(settings.__file__).parent / "configs" / "base.yaml")
NAMES = (
    "use_triton_sel, sel_triton_min_L, sel_triton_group, sel_triton_db, batch_invariant, use_sel_pack, force_parity, "
    "probe, debug_timing, debug_compare, debug_shapes, debug_cache, vllm"
)
INTEGER = "expected a non-negative integer"


@pytest.fixture(autouse=True)
def pristine(monkeypatch, user_folder):
    """No NSA_* variable, an empty user configuration, nothing cached; and the same for the tests that follow."""
    for name in (*settings.NAMES, "config"):
        monkeypatch.delenv(f"NSA_{name.upper()}", raising=False)
    settings.reload()


@pytest.fixture
def user_yaml(monkeypatch, tmp_path):
    def write(text):
        path = tmp_path / "mine.yaml"
        path.write_text(text)
        monkeypatch.setenv("NSA_CONFIG", str(path))
        settings.reload()
        return path

    return write


def raises_exactly(kind, text):
    return pytest.raises(kind, match=f"^{re.escape(text)}$")


def test_defaults():
    assert settings.get() == settings.Settings()
    assert settings.sources() == dict.fromkeys(settings.NAMES, BASE)


def test_precedence_yaml_environment_argument(monkeypatch, user_yaml):
    path = user_yaml("runtime:\n  use_triton_sel: off\n  sel_triton_min_L: 100\n  debug_shapes: true\n")
    monkeypatch.setenv("NSA_SEL_TRITON_MIN_L", "200")
    monkeypatch.setenv("NSA_DEBUG_SHAPES", "no")
    settings.reload()
    with settings.configure(debug_shapes=True) as inside:
        assert inside is settings.get()
        assert inside == settings.Settings(use_triton_sel=False, sel_triton_min_L=200, debug_shapes=True)
        assert settings.sources() == {
            **dict.fromkeys(settings.NAMES, BASE),
            "use_triton_sel": str(path),
            "sel_triton_min_L": "NSA_SEL_TRITON_MIN_L",
            "debug_shapes": "nsa.configure",
        }
    assert settings.get().debug_shapes is False


@pytest.mark.parametrize("name", settings.NAMES)
def test_every_setting_has_an_environment_name(monkeypatch, name):
    text, value = ("never", "never") if name == "probe" else ("0", 0)
    monkeypatch.setenv(f"NSA_{name.upper()}", text)
    settings.reload()
    assert getattr(settings.get(), name) == value
    assert settings.sources()[name] == f"NSA_{name.upper()}"


BOOLEAN, WORD = "expected one of 1, 0, true, false, yes, no, on, off", "expected one of auto, always, never"
READ = {
    "FORCE_PARITY": {"1": True, "ON": True, "yes": True, "False": False, "0": False},
    "PROBE": {"auto": "auto", "ALWAYS": "always", " never ": "never"},
}
UNREADABLE = {
    "FORCE_PARITY": (("maybe", "", "2"), BOOLEAN),
    "SEL_TRITON_MIN_L": (("-1", "1e3", "off", "", "None"), INTEGER),
    "PROBE": (("off", "1", ""), WORD),
    "CONFIG": (("",), "expected the path of a YAML file, got nothing"),
}


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, texts in READ.items() for text in texts])
def test_values_in_the_environment(monkeypatch, name, text):
    monkeypatch.setenv(f"NSA_{name}", text)
    settings.reload()
    assert getattr(settings.get(), name.lower()) == READ[name][text]


@pytest.mark.parametrize(("name", "text"), [(name, text) for name, (texts, _) in UNREADABLE.items() for text in texts])
def test_values_in_the_environment_that_cannot_be_read(monkeypatch, name, text):
    monkeypatch.setenv(f"NSA_{name}", text)
    settings.reload()
    with raises_exactly(ValueError, f"NSA_{name}={text!r}: {UNREADABLE[name][1]}"):
        settings.get()


def test_read_once(monkeypatch):
    settings.get()
    monkeypatch.setenv("NSA_FORCE_PARITY", "1")
    assert settings.get().force_parity is False


@pytest.mark.parametrize(("path", "reloads", "said"), [
    ("/nowhere.yaml", 1, "NSA_CONFIG='/nowhere.yaml' is skipped: there is no such file"),
    ("/proc", 2, "/proc is skipped: it cannot be read (Is a directory)"),  # root may read any file, but no folder
], ids=["missing", "unreadable"])  # fmt: skip
def test_config_file_that_is_skipped(monkeypatch, caplog, path, reloads, said):
    """And one warning, however often the settings are read."""
    monkeypatch.setenv("NSA_CONFIG", path)
    for _ in range(reloads):
        settings.reload()
        assert settings.get() == settings.get() == settings.Settings()
    assert [r.getMessage() for r in caplog.records] == [said]


def test_a_misspelt_variable_is_named(monkeypatch, caplog):
    wrong = "FORCE_PARTY", "SOMETHING_ELSE"
    for name in (*(f"NSA_{word}" for word in wrong), "nsa_probe", "NSA_FORCE_PARITY"):
        monkeypatch.setenv(name, "0")
    settings.reload()
    settings.get()
    assert [r.getMessage() for r in caplog.records] == [
        f"the variable {name} is not read: did you mean {ours}?"
        for name, ours in ((f"NSA_{wrong[0]}", "NSA_FORCE_PARITY"), ("nsa_probe", "NSA_PROBE"))
    ]


@pytest.mark.parametrize("home", ["unset", "unreadable"])
def test_measurements_of_a_user_without_a_home(monkeypatch, caplog, home):
    """As in a container. Nothing is said of a home that is not there."""
    for name in ("XDG_CONFIG_HOME", "XDG_CACHE_HOME", "HOME"):
        monkeypatch.delenv(name, raising=False)

    def refused(*_):
        raise RuntimeError("Could not determine home directory.") if home == "unset" else PermissionError(13, "denied")

    monkeypatch.setattr(Path, "expanduser" if home == "unset" else "open", refused)
    monkeypatch.setenv("XDG_CONFIG_HOME", "~/.config" if home == "unset" else "/root/hidden")
    gpu.measured.cache_clear()
    try:
        assert gpu.measured("NVIDIA of nobody") == gpu.Gpu()
    finally:
        gpu.measured.cache_clear()
    said = [r.getMessage() for r in caplog.records]
    skipped = "/root/hidden/nsa/gpus/nvidia-of-nobody.yaml is skipped: it cannot be read (denied)"
    assert said == ([] if home == "unset" else [skipped, *said[1:]])


@pytest.mark.parametrize(("text", "message"), [
    ("runtime: {fast: 1}", f"unknown key runtime.fast, expected one of: {NAMES}"),
    ("debug: 1", "unknown key debug, expected one of: runtime"),
    *(
        (f"runtime: {{{name}: {value}}}", f"runtime.{name}: {expected}, got {got}")
        for name, value, expected, got in (
            ("force_parity", "maybe", "expected true or false", "'maybe'"),
            ("force_parity", "1", "expected true or false", "1"),
            ("sel_triton_min_L", "-1", f"{INTEGER} or null", "-1"),
            ("sel_triton_min_L", "on", f"{INTEGER} or null", "True"),
            ("probe", "off", WORD, "False"),
            ("probe", "often", WORD, "'often'"),
        )
    ),
    ("runtime: 3", "runtime: expected a mapping, got 3"),
    ("[]", "expected a mapping of settings, got []"),
    ("runtime: {probe: never}\nruntime: {}", "line 2: runtime: expected each key once, got it again"),
    ("runtime:\n  probe: never\n  probe: always", "line 3: probe: expected each key once, got it again"),
    ("runtime: {", "expected YAML: "),
])  # fmt: skip
def test_yaml_error(user_yaml, text, message):
    path = user_yaml(text)
    end = "" if message.endswith(": ") else "$"  # the rest is PyYAML's
    with pytest.raises(ValueError, match=f"^{re.escape(f'{path}: {message}')}{end}"):
        settings.get()


def test_configure_nests_and_restores():
    with settings.configure(sel_triton_min_L=5, sel_triton_db=False):
        with settings.configure(sel_triton_min_L=None):
            assert settings.get() == settings.Settings(sel_triton_db=False)
        assert settings.get() == settings.Settings(sel_triton_min_L=5, sel_triton_db=False)
    assert settings.get() == settings.Settings()
    with contextlib.suppress(KeyError), settings.configure(force_parity=True):
        raise KeyError
    assert settings.get() == settings.Settings()


def test_configure_blocks_may_end_out_of_order():
    first, second = settings.configure(force_parity=True), settings.configure(debug_timing=True)
    first.__enter__()
    second.__enter__()
    first.__exit__(None, None, None)
    assert settings.get() == settings.Settings(debug_timing=True)
    second.__exit__(None, None, None)
    assert settings.get() == settings.Settings()


def test_a_backward_pass_has_the_settings_of_its_caller(device):
    """On a GPU autograd runs it on another thread: checkpoints compute their forward again there."""
    seen = []
    x = torch.ones(1, device=device, requires_grad=True)
    x.register_hook(lambda grad: seen.append((settings.get().force_parity, settings.get().sel_triton_min_L)))
    with nsa.configure(force_parity=True, sel_triton_min_L=3):
        (2 * x).sum().backward()
    x.sum().backward()
    assert seen[0] == (True, 3)
    assert seen[1][0] is False


def seen_elsewhere():
    """`force_parity` in a new thread."""
    with ThreadPoolExecutor(1) as thread:
        return thread.submit(settings.get).result().force_parity


def test_before_pytorch_2_13_the_only_open_block_counts(monkeypatch):
    """A thread that works for a backward pass. Of two threads with open blocks it cannot know which one called."""
    monkeypatch.setattr(settings, "_backward_pass", lambda: 0)
    monkeypatch.setattr(torch._C, "_is_key_in_tls", lambda name: False)
    begun, ended = threading.Event(), threading.Event()

    def other():
        with nsa.configure(sel_triton_min_L=5):
            begun.set()
            ended.wait()

    with nsa.configure(force_parity=True):
        seen = [seen_elsewhere()]
        thread = threading.Thread(target=other)
        thread.start()
        begun.wait()
        seen.append(seen_elsewhere())
        ended.set()
        thread.join()
        seen.append(seen_elsewhere())
    assert [*seen, seen_elsewhere()] == [True, False, True, False]


def test_configure_stays_in_its_thread():
    with settings.configure(force_parity=True):
        assert seen_elsewhere() is False


@pytest.mark.parametrize(("values", "kind", "message"), [
    ({"fast": True}, TypeError, f"unknown setting 'fast', expected one of: {NAMES}"),
    ({"force_parity": "yes"}, TypeError, "force_parity: expected True or False, got 'yes'"),
    ({"force_parity": 1}, TypeError, "force_parity: expected True or False, got 1"),
    ({"force_parity": None}, TypeError, "force_parity: expected True or False, got None"),
    ({"sel_triton_min_L": 1.5}, TypeError, f"sel_triton_min_L: {INTEGER} or None, got 1.5"),
    ({"sel_triton_min_L": True}, TypeError, f"sel_triton_min_L: {INTEGER} or None, got True"),
    ({"probe": False}, TypeError, "probe: expected one of auto, always, never, got False"),
    ({"probe": "off"}, ValueError, "probe: expected one of auto, always, never, got 'off'"),
    ({"sel_triton_min_L": -1}, ValueError, f"sel_triton_min_L: {INTEGER} or None, got -1"),
])  # fmt: skip
def test_configure_error_comes_without_with(values, kind, message):
    with raises_exactly(kind, message):
        settings.configure(**values)


@pytest.mark.parametrize(("tiles", "message"), [
    ({"key_minor": None}, "unknown family 'key_minor', expected one of: small_blocks, union, key_major, query_major"),
    ({"query_major": 3}, "query_major: expected a Choice of nsa.kernels.query_major.tiles or None, got 3"),
    ({"backward_unions": ()}, "backward_unions: expected a Unions of nsa.kernels.backward.tiles or None, got ()"),
])  # fmt: skip
def test_pinned_error_comes_without_with(tiles, message):
    with pytest.raises(TypeError, match=f"^{re.escape(message)}"):
        nsa.kernels.pinned(**tiles)


def test_reload_makes_calls_look_again():
    """A threshold file written by this very process must reach shapes that were planned before."""
    settings.get()
    before = len(routing._plans)
    q = k = torch.zeros(1, 1, 1, 16)
    nsa.selection_attention(q, k, k, ranges=torch.zeros(1, 1, 1, 1, 2, dtype=torch.int32))
    assert len(routing._plans) >= max(before, 1)
    settings.reload()
    assert not routing._plans


def test_user_probes(monkeypatch, tmp_path):
    monkeypatch.setenv("XDG_CACHE_HOME", str(tmp_path))
    assert settings.user_probes() == tmp_path / "nsa" / "probe"
    monkeypatch.delenv("XDG_CACHE_HOME")
    monkeypatch.setenv("HOME", str(tmp_path))
    assert settings.user_probes() == tmp_path / ".cache" / "nsa" / "probe"
    monkeypatch.delenv("HOME")
    monkeypatch.setattr(os.path, "expanduser", lambda path: path)  # as where the user id is unknown
    assert settings.user_probes() is None


def test_child_environment(monkeypatch):
    monkeypatch.setenv("TRITON_INTERPRET", "1")
    monkeypatch.setenv("CUDA_VISIBLE_DEVICES", "3,1")
    monkeypatch.setenv("NSA_PROBE", "always")
    assert settings.child_environment(True) == os.environ | {"NSA_PROBE": "never"}
    assert "TRITON_INTERPRET" not in settings.child_environment(False)
    assert settings.child_environment(False)["CUDA_VISIBLE_DEVICES"] == "3,1"


def test_assemblers(monkeypatch):
    for name in ("TRITON_PTXAS_PATH", "TRITON_PTXAS_BLACKWELL_PATH"):
        monkeypatch.delenv(name, raising=False)
    assert settings.assemblers() == {}
    monkeypatch.setenv("TRITON_PTXAS_PATH", "/opt/ptxas")
    assert settings.assemblers() == {"TRITON_PTXAS_PATH": "/opt/ptxas"}
