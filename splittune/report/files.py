"""The names of the files in a folder that a search or a plan writes."""

from __future__ import annotations

CONFIG_FILE = "split.json"
TRIALS_FILE = "trials.csv"
DEVICES_FILE = "devices.csv"
EXPLANATION_FILE = "explanation.txt"
RESULT_FILE = "result.json"
ADVICE_FILE = "advice.csv"
REPORT_FILE = "report.html"
CAPACITY_FILE = "capacity.csv"
MODULES_FILE = "modules.csv"
PICTURE_FILE = "capacity.png"
