package main

import (
	"fmt"
	"io"
	"strings"

	"github.com/spf13/cobra"
	"github.com/spf13/pflag"
)

func newMan() *cobra.Command {
	return &cobra.Command{
		Use:     "man",
		Short:   "Print the manual page",
		Long:    `man writes the manual page, mysqllock(1), in the form that man(1) reads.`,
		Example: `  mysqllock man | sudo tee /usr/local/share/man/man1/mysqllock.1 >/dev/null`,
		Args:    cobra.NoArgs,
		RunE: func(c *cobra.Command, _ []string) error {
			writeMan(c.OutOrStdout(), c.Root())
			return nil
		},
	}
}

var roffEscapes = strings.NewReplacer(`\`, `\e`, "-", `\-`, "'", `\(aq`, "`", "\\(ga", "^", `\(ha`, "~", `\(ti`)

// roff keeps text from being taken for escapes.
func roff(s string) string {
	var b strings.Builder
	for _, r := range roffEscapes.Replace(s) {
		if r < 128 {
			b.WriteRune(r)
		} else {
			fmt.Fprintf(&b, `\[u%04X]`, r)
		}
	}
	return b.String()
}

// writeMan writes one page about root and what is below it, from the same texts as
// --help.
func writeMan(w io.Writer, root *cobra.Command) {
	fmt.Fprintf(w, ".TH MYSQLLOCK 1 \"\" %q \"User Commands\"\n", "mysqllock "+root.Version)
	fmt.Fprintf(w, ".SH NAME\nmysqllock \\- %s\n", roff(strings.ToLower(root.Short[:1])+root.Short[1:]))
	fmt.Fprint(w, ".SH SYNOPSIS\n.B mysqllock\n.I command\n.RI [ flags ]\n")
	fmt.Fprint(w, ".SH DESCRIPTION\n")
	manText(w, root.Long)
	fmt.Fprint(w, ".SH FLAGS OF ALL COMMANDS\n")
	manFlags(w, root.PersistentFlags())
	fmt.Fprint(w, ".SH COMMANDS\n")
	for _, c := range everyCommand(root)[1:] {
		if !c.Runnable() || c.Hidden || c.Name() == "help" || c.Parent().Name() == "completion" {
			continue
		}
		fmt.Fprintf(w, ".SS %s\n", roff(strings.TrimPrefix(c.UseLine(), "mysqllock ")))
		manText(w, c.Long)
		manFlags(w, c.LocalNonPersistentFlags())
		if c.Example != "" {
			fmt.Fprint(w, ".PP\nExamples:\n")
			manText(w, c.Example)
		}
	}
	fmt.Fprint(w, ".SH EXIT STATUS\n")
	manText(w, `0 if all went well, 1 if not, and 2 if the command line was not understood.
Of run it is that of the command: see there.`)
	fmt.Fprint(w, ".SH SEE ALSO\n.BR flock (1),\n.BR timeout (1),\n.BR mysql (1)\n")
}

// manText writes paragraphs. Lines that are indented stay as they are.
func manText(w io.Writer, text string) {
	text = strings.ReplaceAll(strings.Trim(text, "\n"), "\t", "    ")
	for _, paragraph := range strings.Split(text, "\n\n") {
		if strings.HasPrefix(paragraph, " ") {
			fmt.Fprintf(w, ".PP\n.EX\n%s\n.EE\n", guarded(roff(strings.Trim(paragraph, "\n"))))
			continue
		}
		fmt.Fprintf(w, ".PP\n%s\n", guarded(roff(strings.Trim(paragraph, "\n"))))
	}
}

// guarded keeps lines that begin with a dot from being taken for requests.
func guarded(s string) string {
	return strings.TrimPrefix(strings.ReplaceAll("\n"+s, "\n.", "\n\\&."), "\n")
}

func manFlags(w io.Writer, flags *pflag.FlagSet) {
	flags.VisitAll(func(f *pflag.Flag) {
		if f.Hidden || f.Name == "help" {
			return
		}
		value, usage := pflag.UnquoteUsage(f)
		name := "--" + f.Name
		if f.Shorthand != "" {
			name = "-" + f.Shorthand + ", " + name
		}
		fmt.Fprintf(w, ".TP\n.B %s", roff(name))
		if value != "" {
			fmt.Fprintf(w, " \\fI%s\\fR", roff(value))
		}
		fmt.Fprintf(w, "\n%s", guarded(roff(strings.ReplaceAll(usage, "\n", " "))))
		if f.DefValue != "" && f.DefValue != "0" && f.DefValue != "0s" && f.DefValue != "false" && f.DefValue != "[]" && f.DefValue != "-1" {
			fmt.Fprintf(w, " (default %s)", roff(f.DefValue))
		}
		fmt.Fprintln(w)
	})
}
