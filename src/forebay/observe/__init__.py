"""What people look at: progress, later metrics and pages. Reads others' doors; nobody reads this one but the CLI."""
