#!/usr/bin/env bash
# From nothing to trained heads and a report on two CPU cores: make a virtual environment, get the
# demo model, run recipes/smollm2-135m.yaml, and say how long each stage took.
#
#   bash scripts/quickstart.sh
#
# See scripts/setup.sh for the variables PYTHON and TORCH. Run again, it goes on where it stopped.
set -euo pipefail
cd "$(dirname "$0")/.."

bash scripts/setup.sh
installed=$SECONDS
.venv/bin/python scripts/make_demo_model.py
converted=$SECONDS
.venv/bin/medusa-train run recipes/smollm2-135m.yaml
finished=$SECONDS

.venv/bin/python - "$installed" "$((converted - installed))" "$((finished - converted))" <<'PYTHON'
import json
import sys

installation, model, run = map(int, sys.argv[1:])
with open("runs/smollm2-135m/manifest.json", encoding="utf-8") as file:
    stages = json.load(file)["stages"]
rows = [("installation", installation), ("demo model", model), ("medusa-train run", run)]
rows += [(f"  {name}", stage["seconds"]) for name, stage in stages.items()]
print("\nseconds")
for name, seconds in rows:
    print(f"  {name:<20}{seconds:>8.0f}")
print("report: runs/smollm2-135m/report/heads_accuracy.html")
PYTHON
