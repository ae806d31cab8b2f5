"""What people write a form in, read and written anew for llguidance: schemas, patterns, Lark."""
