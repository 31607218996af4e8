"""`/v1/eval_reports`: results of `personae eval` in a folder, for the console to show."""
