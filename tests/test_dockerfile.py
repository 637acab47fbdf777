"""The Dockerfile, as far as it goes without a Docker engine: its form, its pins, and those of its steps that need no root
file system of their own. Which steps those are is said below, and a new one must be added there."""

import fnmatch
import json
import os
import re
import shlex
import shutil
import subprocess
from dataclasses import dataclass, field
from pathlib import Path

import pytest
from end_to_end import ROOT

import megarl

DOCKERFILE = ROOT / "Dockerfile"
BIN = ROOT / ".venv/bin"
RUN_HERE = ("launch/setup_env.sh", "megarl train /opt/megarl/configs/quickstart.yaml --dry-run")
NOT_RUN_HERE = {  # what a step contains -> why
    "python3.12-venv": "apt-get, and no root file system but this machine's",
    "cuda-minimal-build": "apt-get, and no root file system but this machine's",
    "useradd": "the accounts of this machine are its own",
    "launch/setup_env.sh gpu": "a CUDA compiler, and half an hour",
    "NVIDIA/apex": "GitHub and a CUDA compiler",
    "CHECK": "the two before it; that it finds out what is missing is tested",
}
MODES = [
    pytest.param(False, id="with the repository's .venv"),
    pytest.param(True, id="from nothing", marks=pytest.mark.soak),
]


@dataclass
class Instruction:
    name: str
    value: str  # joined lines, without flags
    flags: list[str] = field(default_factory=list)
    heredoc: str = ""


def instructions(text: str) -> list[Instruction]:
    """In order. Of the forms that Docker knows those that this Dockerfile uses: comments, continued lines, flags, one
    heredoc per RUN."""
    found, lines = [], iter(text.splitlines())
    for line in lines:
        if not line.strip() or line.lstrip().startswith("#"):
            continue
        while line.endswith("\\"):
            following = next(lines)
            line = line if following.lstrip().startswith("#") else line[:-1].rstrip() + " " + following.strip()
        name, _, value = line.partition(" ")
        flags = []
        while match := re.match(r"(--[a-z-]+=\S+)\s+", value):
            flags.append(match[1])
            value = value[match.end() :]
        heredoc = []
        if end := re.search(r"<<'?([A-Z]+)'?", value):
            while (body := next(lines)) != end[1]:
                heredoc.append(body)
        found.append(Instruction(name, value.strip(), flags, "\n".join(heredoc)))
    return found


def stages(text: str) -> list[list[Instruction]]:
    """Each from its FROM on."""
    found: list[list[Instruction]] = []
    for instruction in instructions(text):
        if instruction.name == "FROM":
            found.append([])
        found[-1].append(instruction)
    return found


def test_instructions_are_read_with_flags_continuations_comments_and_heredocs():
    text = "# one\nFROM a AS b\nRUN --mount=type=cache,target=/x a && \\\n  # why\n  b \\\n  c\nRUN python <<'END'\n# d\nEND\n"
    assert instructions(text) == [
        Instruction("FROM", "a AS b"),
        Instruction("RUN", "a && b c", ["--mount=type=cache,target=/x"]),
        Instruction("RUN", "python <<'END'", heredoc="# d"),
    ]


def kept(path: str) -> bool:
    """Whether .dockerignore lets a path into the build context: the last pattern that matches it or a folder around it."""
    keep = True
    names = path.split("/")
    around = ["/".join(names[:depth]) for depth in range(1, len(names) + 1)]
    for line in (ROOT / ".dockerignore").read_text().splitlines():
        if not line or line.startswith("#"):
            continue
        pattern = line.removeprefix("!")
        anywhere = pattern.startswith("**/")
        if any(fnmatch.fnmatch(a.split("/")[-1] if anywhere else a, pattern.removeprefix("**/")) for a in around):
            keep = line.startswith("!")
    return keep


def context_files() -> list[str]:
    """The files that Docker would be sent."""
    top = [entry.name for entry in ROOT.iterdir() if kept(entry.name)]
    files = [file for name in top for file in ([ROOT / name] if (ROOT / name).is_file() else (ROOT / name).rglob("*"))]
    return [path for file in files if file.is_file() and kept(path := str(file.relative_to(ROOT)))]


@dataclass
class Build:
    """Both stages in one folder `root` that stands for /: the files at their places, the variables set, and RUN_HERE run."""

    root: Path
    environment: dict[str, str]
    working_directory: str = "/"
    from_nothing: bool = False  # else with the repository's .venv
    ran: list[str] = field(default_factory=list)
    skipped: list[str] = field(default_factory=list)

    def here(self, text: str) -> str:
        return re.sub(r"/(opt/megarl|workspace)\b", lambda match: f"{self.root}{match[0]}", text)

    @property
    def folder(self) -> Path:
        return Path(self.here(self.working_directory))

    def follow(self, instruction: Instruction) -> None:
        if instruction.name == "WORKDIR":
            self.working_directory = instruction.value
            self.folder.mkdir(parents=True, exist_ok=True)
        elif instruction.name == "ENV":
            for name, value in re.findall(r"(\w+)=(\S+)", instruction.value):
                value = re.sub(r"\$(\w+)", lambda match: self.environment[match[1]], self.here(value))
                self.environment[name] = value
        elif instruction.name == "COPY" and not instruction.flags:
            self.copy(*instruction.value.split())
        elif instruction.name == "RUN":
            self.run(instruction)

    def copy(self, *names: str) -> None:
        *sources, target = names
        for source in sources:
            of_source = [
                path for path in context_files() if source == "." or path == source or path.startswith(source + "/")
            ]
            assert of_source, f"COPY {source}: nothing of it is in the build context"
            is_folder = source == "." or (ROOT / source).is_dir()
            for path in of_source:
                inside = Path(path).relative_to(source) if is_folder else Path(path).name
                file = Path(self.here(str(Path(self.working_directory) / target / inside)))
                file.parent.mkdir(parents=True, exist_ok=True)
                shutil.copy2(ROOT / path, file)

    def run(self, step: Instruction) -> None:
        if step.value not in RUN_HERE or (step.value == "launch/setup_env.sh" and not self.from_nothing):
            self.skipped.append(step.value)
            return
        result = self.command("bash", "-o", "pipefail", "-c", self.here(step.value))
        assert result.returncode == 0, f"{step.value}\n{result.stdout}{result.stderr}"
        self.ran.append(step.value)

    def command(
        self, *command: str, inside: tuple[str, ...] = (), stdin: str | None = None
    ) -> subprocess.CompletedProcess:
        return subprocess.run(
            [*inside, *command],
            cwd=self.folder,
            env=self.environment,
            input=stdin,
            capture_output=True,
            text=True,
            timeout=900,
        )


@pytest.fixture(scope="module", params=MODES)
def built(request, tmp_path_factory) -> Build:
    """uv's settings for a cache on another file system are left out: here it links, and compiles what is imported."""
    root = tmp_path_factory.mktemp("image")
    mine = {name: value for name, value in os.environ.items() if name not in ("PYTHONPATH", "VIRTUAL_ENV")}
    mine |= {"PATH": f"{BIN}:{os.environ['PATH']}", "CUDA_VISIBLE_DEVICES": ""}
    build = Build(root, mine, from_nothing=request.param)
    if not build.from_nothing:
        (root / "opt/megarl").mkdir(parents=True)
        (root / "opt/megarl/.venv").symlink_to(ROOT / ".venv")
    for stage in stages(DOCKERFILE.read_text()):
        for instruction in stage:
            build.follow(instruction)
            for name in ("UV_LINK_MODE", "UV_COMPILE_BYTECODE"):
                build.environment.pop(name, None)
    return build


def test_the_steps_that_can_run_here_do_and_the_others_are_those_that_are_known(built):
    expected = list(RUN_HERE) if built.from_nothing else [RUN_HERE[1]]
    assert built.ran == expected
    unknown = [
        step for step in built.skipped if step not in RUN_HERE and not any(part in step for part in NOT_RUN_HERE)
    ]
    assert not unknown, "say in RUN_HERE or NOT_RUN_HERE what becomes of these steps"
    assert all(any(part in step for step in built.skipped) for part in NOT_RUN_HERE)


def test_the_check_of_the_image_finds_out_that_apex_is_missing(built):
    [check] = [step for stage in stages(DOCKERFILE.read_text()) for step in stage if step.heredoc]
    result = built.command(str(built.root / "opt/megarl" / check.value.split()[0]), "-", stdin=check.heredoc)
    assert result.returncode == 1 and "AssertionError: apex is absent (optional)" in result.stderr


def in_a_container(built: Build, script: str) -> subprocess.CompletedProcess:
    """Run a script whose `healthcheck` is the image's, with no processes and no network but its own."""
    inside = ("unshare", "--net", "--pid", "--fork", "--mount-proc", "--kill-child")
    if built.command("true", inside=inside).returncode != 0:
        pytest.skip("namespaces are not allowed here")
    [check] = [i for stage in stages(DOCKERFILE.read_text()) for i in stage if i.name == "HEALTHCHECK"]
    command = shlex.join(json.loads(built.here(check.value.rpartition("CMD ")[2])))
    return built.command(
        "bash", "-c", f"set -e; ip link set lo up; healthcheck() {{ {command}; }}\n{script}", inside=inside
    )


def test_an_image_without_ray_is_healthy(built):
    result = in_a_container(built, "healthcheck")
    assert result.returncode == 0 and result.stdout == f"megarl {megarl.__version__}: healthy\n", result.stderr


@pytest.mark.soak
def test_an_image_with_a_node_of_ray_is_healthy_as_long_as_the_head_answers(built):
    script = f"""
    ray start --head --port 7379 --temp-dir {built.root}/ray --num-cpus 1 --object-store-memory 80000000 \
      --include-dashboard false >/dev/null
    healthcheck
    kill -STOP $(pgrep gcs_server)
    healthcheck || echo hangs"""
    result = in_a_container(built, script)
    assert result.stdout.splitlines() == [f"megarl {megarl.__version__}: healthy", "hangs"], result.stderr
    assert re.search(r"the head of the Ray cluster at \S+:7379 does not answer", result.stderr)


def test_the_linter_finds_nothing():
    result = subprocess.run([BIN / "hadolint", DOCKERFILE], cwd=ROOT, capture_output=True, text=True, timeout=60)
    assert result.returncode == 0, result.stdout


def test_the_build_context_is_small_and_has_all_that_is_copied():
    files = context_files()
    assert {"constraints.txt", "launch/setup_env.sh", "megarl/cli.py", "configs/quickstart.yaml"} <= set(files)
    assert sum((ROOT / path).stat().st_size for path in files) < 5e6
    assert not any(
        kept(f"{name}/file") for name in (".venv", ".git", "runs", "models", "data", "tests", "megarl.egg-info")
    )
    assert not any("__pycache__" in path for path in files) and not kept(".env")


def test_versions_agree_with_the_pins():
    text = DOCKERFILE.read_text()
    pins = dict(re.findall(r"^([\w.-]+)==(\S+)$", (ROOT / "constraints.txt").read_text(), flags=re.MULTILINE))
    bases = re.findall(r"^FROM nvidia/cuda:([\d.]+)-\S+@sha256:[0-9a-f]{64}", text, flags=re.MULTILINE)
    assert bases == [pins["cuda-toolkit"]] * 2  # whose libraries torch's wheels bring
    release = "-".join(pins["cuda-toolkit"].split(".")[:2])
    assert set(re.findall(r"(?:cuda|libcu)[a-z-]+-(\d+-\d+)", text)) == {release}
    assert f'org.opencontainers.image.version="{megarl.__version__}"' in text
    assert re.search(r"^ARG APEX_COMMIT=[0-9a-f]{40}$", text, flags=re.MULTILINE)


def test_an_image_is_installed_as_the_tests_and_the_quickstart_are():
    steps = [step.value for stage in stages(DOCKERFILE.read_text()) for step in stage if step.name == "RUN"]
    assert [step for step in steps if "setup_env" in step] == ["launch/setup_env.sh", "launch/setup_env.sh gpu"]
    installs = re.compile(r"\b(pip|uv|conda)\b[^\n]* install\b")
    assert [step for step in steps if installs.search(step)] == [step for step in steps if "NVIDIA/apex" in step]
    for script in ("tests/run.sh", "launch/quickstart.sh"):
        text = (ROOT / script).read_text()
        assert "launch/setup_env.sh" in text and not installs.search(text)
    assert "tests/run.sh" in (ROOT / ".ci/run").read_text() and not installs.search((ROOT / ".ci/run").read_text())


def test_the_packages_for_gpus_go_with_the_others_and_are_pinned():
    """What `launch/setup_env.sh gpu` would install, found without installing it."""
    [command] = re.findall(
        r'^"\$uv" (pip install .*(?:\n .*)*)$', (ROOT / "launch/setup_env.sh").read_text(), re.MULTILINE
    )
    options = shlex.split(command.replace("\\\n", " ").replace("${extras:+[$extras]}", "[gpu]").replace("--quiet", ""))
    result = subprocess.run(
        [BIN / "uv", *options, "--dry-run", "--reinstall"], cwd=ROOT, capture_output=True, text=True, timeout=300
    )
    if "error sending request" in result.stderr:
        pytest.skip("no package index is reached from here")
    assert result.returncode == 0, result.stderr
    wanted = re.findall(r"^ [+~] ([\w.-]+==\S+)$", result.stderr, flags=re.MULTILINE)
    pins = (ROOT / "constraints.txt").read_text().splitlines()
    assert any(name.startswith("transformer-engine-torch==") for name in wanted)
    assert not [name for name in wanted if name not in pins], "to be pinned in constraints.txt"
    assert "--build-constraints" in options, "transformer-engine would be built against the newest torch"


def test_nothing_runs_as_root():
    *_, last = stages(DOCKERFILE.read_text())
    assert [i.value for i in last if i.name == "USER"] == ["${USER_ID}"]
    assert re.search(r"^ARG USER_ID=[1-9]\d*$", DOCKERFILE.read_text(), flags=re.MULTILINE)
