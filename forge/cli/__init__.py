"""The command line: `forge serve`, `forge generate`, `forge bench`, `forge sim`, `forge learn`,
`forge info`.

    options ◄── settings ◄── parser ◄── commands ◄── main
       ▲           ▲           ▲                      │ loads, where the command is named
       └───────────┴───────────┴── bench, sim, learn ◄┘

options    what can be set: flags, environment names, file keys and the tables of the docs
settings   values from flags, environment, file and defaults, in this order
parser     argparse with refusals of one line
commands   serve, generate, info
main       the parser of all commands, exit statuses
"""
