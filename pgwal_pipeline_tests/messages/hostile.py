"""Names that would act on a terminal or a page, were they written as they are."""

HOSTILE = [
    "\x1b]0;owned\x07",
    "\x1b[2J\x9b31m",
    "two\nlines\r\n",
    "\u202egpj.exe",
    "`![x](http://evil.example/x.png)`",
    "``[y](javascript:alert(1))",
    "<img src=x onerror=alert(1)>",
    "*a* _b_ #c",
    " ` ",
    "%s{0}[bold]",
]
