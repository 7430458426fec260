package main

import (
	"context"
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"

	"github.com/mysqllock/mysqllock/inspect"
)

func newDoctor(at *target) *cobra.Command {
	var asJSON bool
	var need []string
	c := &cobra.Command{
		Use:   "doctor",
		Short: "Say which locks are safe on the server, and why",
		Long: `doctor examines the server and what the account may do there: version, topology,
proxies, the lock table and the privileges on it, clock and settings. It says of
each strategy whether its locks hold there, and changes nothing.

The exit status is 1 where a check has failed; with --need, where a strategy that
is named there does not hold.

With --json it is one object: "version", "mariadb", "strategies" ("strategy",
"safe", "why") and "checks" ("name", "state", "detail", "remedy"), a state being
ok, note, warning or failure.`,
		Example: `  mysqllock doctor
  mysqllock doctor --need row,lease   # before a deployment`,
		Args: cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			return at.inspectingBy(c.Context(), true, func(ctx context.Context, i *inspect.Inspector) error {
				d, err := i.Doctor(ctx)
				if err != nil {
					return err
				}
				failed, err := failures(d, need)
				if err != nil {
					return err
				}
				if asJSON {
					err = printJSON(c.OutOrStdout(), diagnosed(d))
				} else {
					printDiagnosis(c.OutOrStdout(), d)
				}
				if err == nil && len(failed) > 0 {
					err = fmt.Errorf("not safe here: %s", strings.Join(failed, ", "))
				}
				return err
			})
		},
	}
	c.Flags().BoolVar(&asJSON, "json", false, "for programs")
	c.Flags().StringSliceVar(&need, "need", nil, "`strategies` of which the exit status tells, separated by commas")
	return c
}

// failures are the checks that have failed, or those of the strategies needed
// that do not hold.
func failures(d *inspect.Diagnosis, need []string) (failed []string, err error) {
	if len(need) == 0 {
		for _, check := range d.Checks {
			if check.State == inspect.Failure {
				failed = append(failed, check.Name)
			}
		}
		return failed, nil
	}
	safe := make(map[string]bool)
	var all []string
	for _, v := range d.Verdicts {
		safe[v.Strategy] = v.Safe
		all = append(all, v.Strategy)
	}
	for _, strategy := range need {
		holds, exists := safe[strategy]
		if !exists {
			return nil, fmt.Errorf("--need: %q is no strategy: want some of %s", strategy, strings.Join(all, ", "))
		}
		if !holds {
			failed = append(failed, strategy)
		}
	}
	return failed, nil
}

// continued is how far the rest of a long line is indented.
const continued = 4

func printDiagnosis(w io.Writer, d *inspect.Diagnosis) {
	c, width := coloursFor(w), widthOf(w)
	rows := [][]string{{"STRATEGY", "SAFE", "WHY"}}
	for _, v := range d.Verdicts {
		answer := "yes"
		if !v.Safe {
			answer = "NO"
		}
		rows = append(rows, []string{v.Strategy, answer, strings.Join(v.Why, "; ")})
	}
	table(w, c, rows, func(i int, line string) string {
		line = wrapped(line, width, strings.Repeat(" ", continued))
		if !d.Verdicts[i-1].Safe {
			return c.red(line)
		}
		return c.green(line)
	})
	fmt.Fprintln(w)
	rows = [][]string{{"CHECK", "STATE", "DETAIL"}}
	for _, check := range d.Checks {
		rows = append(rows, []string{check.Name, string(check.State), firstLine(check.Detail)})
	}
	table(w, c, rows, func(i int, line string) string {
		line = wrapped(line, width, strings.Repeat(" ", continued))
		switch d.Checks[i-1].State {
		case inspect.Failure:
			return c.red(line)
		case inspect.Warning:
			return c.yellow(line)
		}
		return line
	})
	for _, check := range d.Checks {
		if check.Remedy != "" {
			fmt.Fprintf(w, "\n%s\n%s\n", c.bold("What would help with "+printable(check.Name)+":"), indented(check.Remedy))
		}
	}
}

func firstLine(s string) string {
	line, _, _ := strings.Cut(s, "\n")
	return line
}

// indented keeps the lines of s, each printable.
func indented(s string) string {
	lines := strings.Split(s, "\n")
	for i := range lines {
		lines[i] = "  " + printable(lines[i])
	}
	return strings.Join(lines, "\n")
}

type (
	jsonDiagnosis struct {
		Version    string        `json:"version"`
		MariaDB    bool          `json:"mariadb"`
		Strategies []jsonVerdict `json:"strategies"`
		Checks     []jsonCheck   `json:"checks"`
	}
	jsonVerdict struct {
		Strategy string   `json:"strategy"`
		Safe     bool     `json:"safe"`
		Why      []string `json:"why"`
	}
	jsonCheck struct {
		Name   string        `json:"name"`
		State  inspect.State `json:"state"`
		Detail string        `json:"detail"`
		Remedy string        `json:"remedy,omitempty"`
	}
)

func diagnosed(d *inspect.Diagnosis) jsonDiagnosis {
	out := jsonDiagnosis{Version: d.Version, MariaDB: d.MariaDB}
	for _, v := range d.Verdicts {
		out.Strategies = append(out.Strategies, jsonVerdict(v))
	}
	for _, check := range d.Checks {
		out.Checks = append(out.Checks, jsonCheck(check))
	}
	return out
}
