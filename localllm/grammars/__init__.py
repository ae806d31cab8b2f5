"""Rewrites the formats that people give for llguidance: JSON schemas, patterns, Lark grammars."""
