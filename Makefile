# Everything runs from a virtual environment of its own; `make` needs Python 3.11 or newer and nothing else.
SHELL := /bin/bash
PYTHON ?= python3
VENV := .venv
BIN := $(VENV)/bin
LAB := inventories/lab
GPU_PIECES := $(or $(XDG_CACHE_HOME),$(HOME)/.cache)/sparks-hy3/gpu/pieces
export ANSIBLE_CONFIG := $(CURDIR)/ansible.cfg
export ANSIBLE_COLLECTIONS_PATH := $(CURDIR)/.collections
export LC_ALL := C.UTF-8
export PATH := $(CURDIR)/$(BIN):$(PATH)

.DEFAULT_GOAL := help
.PHONY: help demo test test-all lint unit integration sanity molecule molecule-tp3 molecule-sglang test-vm test-wheels test-sglang test-cuda-wheel test-faults test-faults-rest test-faults-all faults-page pack-gpu bench lab-up lab-down clean-lab

help: ## Show this list
	@grep -hE '^[a-z0-9-]+:.*## ' $(MAKEFILE_LIST) | sed -E 's/:.*## /\t/' | expand -t 14

$(VENV)/controller: requirements/controller.txt
	$(PYTHON) -c 'import ensurepip' 2>/dev/null || { apt-get update -q; apt-get install -y -q python3-venv; }
	$(PYTHON) -m venv $(VENV)
	$(BIN)/pip install --quiet --requirement $<
	touch $@

$(VENV)/test: requirements/test.txt $(VENV)/controller
	$(BIN)/pip install --quiet --requirement $<
	touch $@

demo: lab-up ## Boot two nodes on this machine and serve a tiny Hy3 on them
	ansible-playbook playbooks/serve-hy3.yml -i $(LAB)

test: lint molecule unit ## What a change must pass (at most 35 minutes)

test-all: lint sanity molecule molecule-tp3 molecule-sglang test-faults test-vm test-wheels test-sglang test-faults-rest bench integration unit ## Everything: before an issue ends

lint: $(VENV)/test ## ruff, mypy, yamllint, ansible-lint
	ruff check .
	ruff format --check .
	mypy -p ansible_collections.sparks.hy3.plugins
	yamllint --strict .
	ansible-lint --offline --profile production --strict
	antsibull-changelog lint

unit: $(VENV)/test ## Unit tests
	pytest tests/unit

integration: FILES ?= $(wildcard tests/integration/test_*.py)
integration: $(VENV)/test lab-up ## Real wheels, real engine, kills; FILES selects some
	failed=; for file in $(FILES); do \
	    pytest $$file && $(PYTHON) tests/changed.py --passed $$file || failed="$$failed $$file"; \
	done; if [ "$$failed" ]; then echo "Failed:$$failed"; exit 1; fi

molecule: SCENARIOS ?= default mp checkpoint patch
molecule: $(VENV)/test lab-up ## Converge, idempotence and verify on the lab; SCENARIOS selects some
	# Molecule remembers by the name of this directory that nodes are prepared, and skips it on nodes that are made anew.
	for scenario in $(SCENARIOS); do \
	    molecule --base-config molecule/config.yml reset --scenario-name $$scenario || exit 1; \
	    molecule --base-config molecule/config.yml test --scenario-name $$scenario || exit 1; \
	done

molecule-tp3: ## The same with three nodes and a padded checkpoint
	$(MAKE) molecule SCENARIOS=tp3
	$(PYTHON) tests/changed.py --passed $@

molecule-sglang: ## The same with SGLang on two nodes: as it must be, without patch P4, without a rank (3 GB, fetched once)
	$(MAKE) molecule SCENARIOS=sglang
	$(PYTHON) tests/changed.py --passed $@

test-faults: $(VENV)/test lab-up ## Eight faults on the lab, in a table: kills, reboots, a frozen node, a cut link (at most 15 minutes)
	pytest tests/faults/test_eight.py

test-faults-rest: $(VENV)/test lab-up ## The other faults, in a table: power, MTU, GIDs, disk, log, venv, two plays
	pytest tests/faults/test_rest.py
	$(PYTHON) tests/changed.py --passed test-faults-rest

test-faults-all: test-faults-rest ## The other faults, and plays that are killed in each role
	pytest tests/integration/test_kill.py --junit-xml=reports/faults/kills.xml
	$(PYTHON) tests/changed.py --passed tests/integration/test_kill.py

faults-page: $(VENV)/test ## Write the tables of the newest runs into docs/faults.md
	PYTHONPATH=.collections $(BIN)/python -m ansible_collections.sparks.hy3.tests.faults.page

sanity: ## ansible-test on two versions of ansible-core, Galaxy's importer, all documentation
	$(PYTHON) tests/official/run.py
	$(PYTHON) tests/changed.py --passed sanity

test-vm: $(VENV)/test ## The nodes' code in a small virtual machine: a real GID table, caps that kill, pressure
	pytest tests/vm
	$(PYTHON) tests/changed.py --passed test-vm

test-wheels: $(VENV)/test ## The patches on 16 released wheels (3.5 GB, fetched once)
	pytest tests/wheels
	$(PYTHON) tests/changed.py --passed test-wheels

test-sglang: $(VENV)/test ## SGLang itself on this CPU, with and without its patches (3 GB, fetched once)
	pytest tests/sglang
	$(PYTHON) tests/changed.py --passed test-sglang

test-cuda-wheel: $(VENV)/test ## Opt-in: patch P1 on vLLM's CUDA wheel, without a GPU (3 GB, fetched once; needs python3.12)
	pytest tests/gpu

pack-gpu: $(VENV)/test ## Opt-in: pack the engine for a machine with one NVIDIA GPU; docs/gpu.md says what to run there
	PYTHONPATH=.collections $(BIN)/python -m ansible_collections.sparks.hy3.tests.gpu.pack
	PYTHONPATH=.collections $(BIN)/python -m ansible_collections.sparks.hy3.tests.gpu.render $(GPU_PIECES)/rendered.json

bench: $(VENV)/test ## Figures against a baseline, one line each; BENCH=page_cache selects one file
	PYTHONPATH=.collections $(BIN)/python tests/bench/run.py

lab-up: $(VENV)/controller ## Start the lab
	ansible-playbook playbooks/lab_up.yml -i $(LAB)

lab-down: $(VENV)/controller ## Stop the lab, keep its engine and checkpoint
	ansible-playbook playbooks/lab_down.yml -i $(LAB)

clean-lab: $(VENV)/controller ## Stop the lab and remove all that it made
	ansible-playbook playbooks/lab_down.yml -i $(LAB) --extra-vars hy3_lab_state=purged
