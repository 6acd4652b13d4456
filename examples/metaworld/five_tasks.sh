#!/bin/sh
# Five tasks of Meta-World: scripted demonstrations, supervised learning, PPO, and what PPO has added. In any folder:
#   sh .../examples/metaworld/five_tasks.sh
set -e
here=$(dirname "$(realpath "$0")")
record() {
    embodied record "$here/expert.yaml" --env.task "metaworld/$1" --out "demos/$1" --episodes "$2" --runtime.mode inline
}
record push-v3 5
record coffee-pull-v3 5
record peg-unplug-side-v3 5
record drawer-open-v3 1
record window-open-v3 1
embodied sft "$here/five_tasks.yaml" --name five-sft \
    --data demos/push-v3 demos/coffee-pull-v3 demos/peg-unplug-side-v3 demos/drawer-open-v3 demos/window-open-v3
embodied train "$here/five_tasks.yaml" --policy.init five-sft --name five-ppo
embodied eval five-ppo --against five-sft --json five_tasks.json
