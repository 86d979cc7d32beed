"""report.html: one file that any browser opens, with nothing fetched and no script."""

from splittune.report.page.folder import REPORT_FILE, save_report

__all__ = ["REPORT_FILE", "save_report"]
