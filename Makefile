# Two commands do everything on a fresh machine: `make train` and `make test`.
RECIPE ?= jobs/recipes/last_digit.yaml
NAME := $(basename $(notdir $(RECIPE)))
RUN := runs/$(NAME)-$(shell date +%Y%m%d-%H%M%S)
# More options for the job, e.g. make train ARGS="--train.seed 1"
ARGS ?=

export RAY_AUTH_MODE := token
export RAY_USAGE_STATS_ENABLED := 0
PATH := $(CURDIR)/.venv/bin:$(PATH)
export PATH

.PHONY: train test test-agents lint bench stop clean

# What the recipe names under build/ is made first; the mark is written last, so that what was interrupted is made again.
BUILT := $(addsuffix /.made,$(shell grep -oE 'build/[A-Za-z0-9_.-]+' $(RECIPE) | sort -u))

train: .venv/ready $(BUILT)
	@scripts/head.sh
	ray job submit --address http://127.0.0.1:8265 --working-dir . --runtime-env-json '{"excludes": [".git", "runs", "docs"]}' -- \
		$(CURDIR)/.venv/bin/python jobs/train.py --recipe $(RECIPE) --root $(CURDIR) --run.name $(NAME) --run.dir $(RUN) $(ARGS)

test: .venv/ready
	.venv/bin/ruff check .
	.venv/bin/ruff format --check .
	.venv/bin/python -m pytest

# Real agents, unchanged (docs/real_agents.md). `make test` skips them.
test-agents: build/agents/ready
	build/agents/bin/python -m pytest tests/real_agents

lint: .venv/ready
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

stop:
	.venv/bin/ray stop

clean:
	rm -rf .venv build *.egg-info

.venv/ready: pyproject.toml scripts/setup.sh
	scripts/setup.sh

build/agents/ready: pyproject.toml scripts/agents.sh | .venv/ready
	scripts/agents.sh

build/last_digit/.made: molt_ray/tiny.py | .venv/ready
	.venv/bin/python -m molt_ray.tiny build/last_digit && touch $@

build/smollm2-135m/.made: molt_ray/smollm2.py | .venv/ready
	.venv/bin/python -m molt_ray.smollm2 build/smollm2-135m && touch $@
