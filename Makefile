.PHONY: setup fmt check test docs

setup: ## .venv with everything for development
	bash scripts/setup.sh dev
	.venv/bin/pre-commit install

fmt: ## format and fix what can be fixed
	.venv/bin/ruff check --fix .
	.venv/bin/ruff format .

check: ## lint, formatting, types, import contracts
	bash scripts/check.sh

test: ## all of the above, then every test
	bash scripts/test.sh

docs: ## pages and lists that are generated
	.venv/bin/python scripts/make_trainer_fields.py
	.venv/bin/python scripts/make_docs.py
