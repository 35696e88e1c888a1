"""What runs tasks: processes of this machine, or a Ray cluster; and the sandbox in which stages run."""
