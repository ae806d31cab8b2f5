"""String formats that a pattern can enforce. All others are annotations, and left out.

llguidance knows some; dates and times are defined here, with leap years and without leap seconds.
Sources: JSON Schema 2020-12, validation, section 7; RFC 3339, sections 5.6 and 5.7.
"""

# Formats that llguidance knows by name.
KNOWN = {"duration", "email", "hostname", "ipv4", "ipv6", "uri", "uuid"}

_YEAR = "(?:[0-9]{3}[1-9]|[0-9]{2}[1-9]0|[0-9][1-9]00|[1-9]000)"  # from 0001 on
_LEAP_YEAR = "(?:[0-9]{2}(?:0[48]|[2468][048]|[13579][26])|(?:0[48]|[2468][048]|[13579][26])00)"
_DATE = (
    f"(?:{_YEAR}-(?:(?:0[13578]|1[02])-(?:0[1-9]|[12][0-9]|3[01])"
    "|(?:0[469]|11)-(?:0[1-9]|[12][0-9]|30)|02-(?:0[1-9]|1[0-9]|2[0-8]))"
    f"|{_LEAP_YEAR}-02-29)"
)
_HOUR = "(?:[01][0-9]|2[0-3]):[0-5][0-9]"
_TIME = f"{_HOUR}:[0-5][0-9](?:[.][0-9]{{1,9}})?(?:Z|[+-]{_HOUR})"

# In Rust's syntax, as pattern.py writes them.
PATTERNS = {
    "date": f"^{_DATE}$",
    "time": f"^{_TIME}$",
    "date-time": f"^{_DATE}T{_TIME}$",
}
