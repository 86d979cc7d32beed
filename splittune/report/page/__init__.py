"""report.html: one file that any browser opens, with nothing fetched and no script."""

from splittune.report.page.folder import save_plan_report, save_report, save_search_report, save_tables_report

__all__ = ["save_plan_report", "save_report", "save_search_report", "save_tables_report"]
