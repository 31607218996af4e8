"""`/v1/eval_reports`: runs of `personae eval` in a folder, and starting one."""
