"""Everything that only a machine with a GPU can say, in stages: `python benchmarks/gpu.py [--minutes 9]`.

    python benchmarks/gpu.py                               all stages that are not measured yet, until the time is up
    python benchmarks/gpu.py --only doctor paths           these, measured or not; `act/openvla-7b` is a part of `act`
    python benchmarks/gpu.py --cpu                         every stage with a tiny model on the processor: does it run?
    python benchmarks/gpu.py --table                       measures nothing: the table of what was measured

Each part of a stage runs in a process of its own with a time limit of its own. What fails is recorded with its message,
and the others go on. The results are in one JSON file, written after every part, so that a later call continues: what
was measured of the same sources on the same hardware is not measured again. What the parts print is beside it, in a
folder of logs. Runs from a plain checkout, without network and without being installed.

Only the standard library is imported here: torch, or any other package, may be what does not work on the machine.
"""

from __future__ import annotations

import argparse  # not tyro, as elsewhere: it may be what is missing
import signal
import sys
from pathlib import Path

ROOT = Path(__file__).resolve().parent.parent
sys.path[:0] = [str(ROOT), str(ROOT / "extensions")]

from benchmarks.gpu_stages import table  # noqa: E402
from benchmarks.gpu_stages.parts import STAGES, parts_of, select  # noqa: E402
from benchmarks.gpu_stages.record import Record  # noqa: E402
from benchmarks.gpu_stages.runner import Runner, look_at_machine  # noqa: E402

RESULTS = ROOT / "benchmarks" / "results"
README = ROOT / "benchmarks" / "README.md"
MODELS = {
    "cuda": ("openvla-7b", "openvla-oft-7b", "pi0", "pi05"),
    "cpu": ("openvla-tiny", "openvla-oft-tiny", "pi0-tiny", "pi05-tiny"),
}


def parse(arguments: list[str] | None = None) -> argparse.Namespace:
    about = "\n".join(f"  {stage.name:8} {stage.about}" for stage in STAGES)
    parser = argparse.ArgumentParser(
        description=(__doc__ or "").splitlines()[0],
        epilog=f"stages, in their order:\n{about}",
        formatter_class=argparse.RawDescriptionHelpFormatter,
    )
    parser.add_argument(
        "--minutes", type=float, default=9.0, help="a part is begun only if it may end within this time"
    )
    parser.add_argument(
        "--only", nargs="+", default=[], metavar="STAGE", help="stages or parts, also if measured already"
    )
    parser.add_argument(
        "--model", nargs="+", default=[], help="default: openvla-7b openvla-oft-7b pi0 pi05; on a CPU the tiny ones"
    )
    parser.add_argument("--cpu", action="store_true", help="tiny models on the CPU (also where torch sees no GPU)")
    parser.add_argument("--json", type=Path, help="default: benchmarks/results/gpu.json; on a CPU gpu_on_cpu.json")
    parser.add_argument("--table", nargs="?", const="-", metavar="FILE", help="print the table, or write it into FILE")
    return parser.parse_args(arguments)


def main(arguments: list[str] | None = None) -> int:
    """Exit status 0 where every part that was begun went well, 130 where it was interrupted."""
    signal.signal(signal.SIGTERM, signal.default_int_handler)  # ended by `timeout` or a scheduler: as by Ctrl-C
    options = parse(arguments)
    if options.table is not None:
        return table.show(Record(options.json or RESULTS / "gpu.json"), options.table)
    machine = look_at_machine(ROOT)
    device = "cpu" if options.cpu or not machine.gpu else "cuda"
    record = Record(options.json or RESULTS / ("gpu.json" if device == "cuda" else "gpu_on_cpu.json"))
    try:
        parts = select(parts_of(tuple(options.model) or MODELS[device], device), options.only)
    except ValueError as error:
        print(f"gpu.py: {error}", file=sys.stderr)
        return 2
    print(f"{machine.hardware}; {machine.summary}; every part computes on {device}")
    runner = Runner(ROOT, record, machine, device, 60 * options.minutes)
    status = runner.run(parts, again=bool(options.only))
    return 130 if runner.interrupted else status


if __name__ == "__main__":
    sys.exit(main())
