"""The display of a run, while it lasts and afterwards. What is written during a run does not import what draws a page.

| module | what a person gets |
|---|---|
| `live` | a table that moves while the run does; plain lines where there is no terminal |
| `metrics` | `metrics.jsonl` and TensorBoard: one row per iteration |
| `report` | a run on one self-contained HTML page, `report.html`: `run_record` reads the folder, `charts` draws |
| `runs_page` | several runs on one page |
| `tables` | an evaluation's result in Markdown |
| `plan_picture` | timelines of plans, predicted beside measured |
"""
