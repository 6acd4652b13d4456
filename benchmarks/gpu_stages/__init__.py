"""The stages of `python benchmarks/gpu.py`.

    parts.py      what there is to measure, in which order, and how long each may take
    runner.py     runs parts, each in a process of its own with a deadline; ends what it leaves behind
    record.py     the results' file
    table.py      the table of results beside what was wanted
    machine.py    what the results belong to: hardware, versions, sources
    __main__.py   runs one part in this process
    work.py       what a part is given
    doctor.py paths.py speed.py offload.py weights.py draw.py modes.py     the stages
    checkpoints.py                                                        random weights as a checkpoint on the disk

gpu.py, parts.py, runner.py, record.py and table.py import nothing but the standard library.
"""
