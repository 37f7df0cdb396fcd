"""``pd-radix verify --thorough``: everything that a host can show, in the order of worth, and one report of it.

outcome.py   what a part comes to, as plain data
host.py      what this machine has
budget.py    how the minutes are shared out
child.py     a command in a process group of its own, with an end
runner.py    one part after the other; what is finished stays finished
parts.py     the table of the parts, and the commands of which they are made
setting.py   what all parts have in common: the host, and what the user has asked for
readings.py  what the results of those commands come to
storm.py     kill, stop and flush, with every answer compared
facts.py     hardware, driver and versions, for the report
report.py    the report
command.py   the options, and the order in which all of it is done
"""
