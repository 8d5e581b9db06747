"""Readers of tool calls, by families of syntax; siirl/dialect/tool_formats.py has them by name."""
