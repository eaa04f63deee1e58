"""What a release must not have: placeholders, advice to install from an index where the name is not
ours, actions that may change."""

import re
import runpy
import shutil
import subprocess
import tomllib
from pathlib import Path

import pytest

CHECKOUT = Path(__file__).resolve().parent.parent
CHECK = CHECKOUT / ".ci" / "publishable"
if not CHECK.exists():
    pytest.skip("needs the whole checkout", allow_module_level=True)
FILES = ("pyproject.toml", "CITATION.cff", "README.md", "SECURITY.md", "CHANGELOG.md")


@pytest.fixture
def folder(tmp_path):
    """The files that the check reads, without placeholders, for a release of version 7.0.0."""
    for name in FILES:
        shutil.copy(CHECKOUT / name, tmp_path)
        text = (tmp_path / name).read_text()
        text = re.sub(r"\.example\b", ".org", text)
        text = re.sub(r'(fallback_version = )".*"', r'\1"7.0.1.dev0"', text)
        text = re.sub(r'"jax\[(cuda1[23])\]', r'"jax_fastops-\1-plugin", \g<0>', text)
        (tmp_path / name).write_text(text.replace("## Unreleased", "## 7.0.0 - 2030-01-01"))
    return tmp_path


def problems(folder):
    return runpy.run_path(str(CHECK))["problems"](folder, "v7.0.0")


def test_a_finished_release_is_publishable(folder):
    assert problems(folder) == []


@pytest.mark.parametrize(
    "file, old, new, says",
    [
        ("pyproject.toml", ".org/source", ".example/source", "source is a placeholder"),
        ("SECURITY.md", ".org>", ".example>", "is a placeholder"),
        ("pyproject.toml", '"jax_fastops-cuda13-plugin", "', '"', "the extra cuda13 does not"),
        ("CHANGELOG.md", "## 7.0.0", "## Unreleased", "there are entries under 'Unreleased'"),
        ("CHANGELOG.md", "## 7.0.0", "## 6.9.0", "no section for v7.0.0"),
        ("pyproject.toml", "7.0.1.dev0", "7.0.0.dev0", "fallback_version 7.0.0.dev0 is not above"),
    ],
)
def test_what_is_missing_is_named(folder, file, old, new, says):
    path = folder / file
    path.write_text(path.read_text().replace(old, new, 1))
    assert any(says in problem for problem in problems(folder))


def test_no_text_says_to_install_from_an_index():
    """Anybody may take the name there. Messages name a checkout, a wheel or another package."""
    listed = subprocess.run(
        ["git", "-C", str(CHECKOUT), "ls-files"], capture_output=True, text=True, check=False
    )
    if listed.returncode:
        pytest.skip("needs Git's list of files")
    advice = re.compile(
        r"pip3? install\b(?![^\n]*--no-index)[^\n`]*?(?<![\w./*-])['\"]?jax[_-]fastops"
        r"([_-]cuda1\d[_-]plugin)?(?![\w/.*-])"
    )
    found = []
    for name in listed.stdout.splitlines():
        path = CHECKOUT / name
        if path.suffix in (".md", ".py", ".cmake", ".toml", ".yml", ".txt", ".cc", ".h") and (
            path.exists() and path != Path(__file__)
        ):
            text = path.read_text()
            found += [f"{name}: {match[0]}" for match in advice.finditer(text)]
    assert not found


def test_plugins_differ_in_the_version_of_cuda_only():
    files = [CHECKOUT / "plugins" / name / "pyproject.toml" for name in ("cuda12", "cuda13")]
    old, new = (file.read_text() for file in files)
    old = re.sub(r"12([.-])9", r"13\g<1>0", old)
    assert re.sub(r'(?i)((?:cuda|cu|::|")[ -]?)12(?!\d)', r"\g<1>13", old) == new
    plugin, package = (
        tomllib.loads(file.read_text()) for file in (files[0], CHECKOUT / "pyproject.toml")
    )
    assert plugin["build-system"]["requires"][1:] == package["build-system"]["requires"][1:]
    version = {"root": "../..", **package["tool"]["setuptools_scm"]}
    assert plugin["tool"]["setuptools_scm"] == version


def test_the_headers_are_those_of_the_oldest_jaxlib():
    built = (CHECKOUT / "CMakeLists.txt").read_text()
    oldest = re.search(r"FASTOPS_JAXLIB_VERSION (\d+\.\d+)\.", built)[1]
    needed = re.findall(r'"jax(?:\[\w+\])?>=(.*)"', (CHECKOUT / "pyproject.toml").read_text())
    assert needed == [oldest] * 3  # the package, cuda12, cuda13


def test_actions_are_pinned():
    for file in (CHECKOUT / ".github" / "workflows").glob("*.yml"):
        for used in re.findall(r"uses: (.*)", file.read_text()):
            assert re.fullmatch(r"[\w/-]+@[0-9a-f]{40} # v[\d.]+", used), (file.name, used)
