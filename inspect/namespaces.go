package inspect

import (
	"context"
	"fmt"
	"slices"
	"strconv"
	"strings"

	"github.com/mysqllock/mysqllock/internal/server"
)

// Namespace is one of the namespaces in a lock table. The same key in two namespaces is
// two locks.
type Namespace struct {
	Name string
	// Database reports that a database has the same name. Then the namespace is, most
	// likely, that of programs which set no lockNamespace and name the database in their
	// DSN. Databases that the account may not see do not count.
	Database bool
}

// namespaces returns the namespaces in the lock table, sorted. It returns nil if the table
// cannot be read.
func (s *session) namespaces(ctx context.Context) (out []Namespace, err error) {
	rows, err := s.query(ctx, fmt.Sprintf("SELECT DISTINCT namespace FROM %s LIMIT %d", s.table, most))
	switch {
	case hidden(err) || server.Interrupted(err): // as the reading of the keys has told
		return nil, nil
	case err != nil:
		return nil, fmt.Errorf("mysqllock: reading the namespaces: %w", err)
	}
	rows = slices.DeleteFunc(rows, func(r []string) bool { return r[0] == "" }) // the high-water row's
	if len(rows) == 0 {
		return nil, nil
	}
	schemas, err := s.query(ctx, "SELECT SCHEMA_NAME FROM information_schema.SCHEMATA")
	if err != nil && !hidden(err) && !server.Interrupted(err) {
		return nil, fmt.Errorf("mysqllock: reading the names of databases: %w", err)
	}
	databases := make(map[string]bool)
	for _, r := range schemas {
		databases[r[0]] = true
	}
	for _, r := range rows {
		out = append(out, Namespace{r[0], databases[r[0]]})
	}
	return out, nil
}

// checkNamespace notes that the lock table has no key of the namespace that is asked for, but keys of
// others: perhaps its name is wrong.
func (p *picture) checkNamespace(all []Namespace) {
	asked := p.asked.namespace
	if asked == "" || len(all) == 0 || slices.ContainsFunc(all, func(n Namespace) bool { return n.Name == asked }) {
		return
	}
	for lock := range p.claims { // of a key whose row is not committed yet, or of an advisory lock
		if l, _, _ := p.asked.lock(lock, nil); l.Namespace == asked {
			return
		}
	}
	var names []string
	for _, n := range all[:min(len(all), 10)] {
		names = append(names, strconv.Quote(n.Name))
	}
	everything := []string{row, lease, advisory}
	p.addGap(Gap{
		What:      fmt.Sprintf("keys of the namespace %q", asked),
		Why:       "the lock table has none of it: the name is wrong, or no program has used it yet",
		Remedy:    "the right name of the namespace; the lock table has keys of " + strings.Join(names, ", "),
		holdersOf: everything, waitersOf: everything,
	})
}

// ByDatabase returns those of namespaces that may differ from another one only because
// programs name different databases in their DSNs. It returns none if there is only one
// namespace.
func ByDatabase(namespaces []Namespace) (names []string) {
	if len(namespaces) < 2 {
		return nil
	}
	for _, n := range namespaces {
		if n.Database {
			names = append(names, n.Name)
		}
	}
	return names
}

// namespaceCheck looks for programs that use the same key in different namespaces.
func (e *examination) namespaceCheck(ctx context.Context) error {
	const name = "namespaces"
	namespaces, err := e.namespaces(ctx)
	if err != nil || len(namespaces) == 0 {
		return err
	}
	var names []string
	for _, n := range namespaces {
		names = append(names, fmt.Sprintf("%q", n.Name))
	}
	detail := "the lock table has keys of " + strings.Join(names, ", ")
	switch by := ByDatabase(namespaces); {
	case len(by) > 0:
		quoted := make([]string, len(by))
		for i, n := range by {
			quoted[i] = fmt.Sprintf("%q", n)
		}
		e.add(name, Warning, detail+"; "+strings.Join(quoted, ", ")+" is also the name of a database,"+
			" and the namespace of programs that set no lockNamespace and use that database: "+
			"the same key in two namespaces is two locks, which can be held at the same time",
			"set the same lockNamespace in all programs that use the same keys; do nothing if their keys are different things")
	case len(namespaces) > 1:
		e.add(name, Note, detail+"; the same key in two namespaces is two locks", "")
	default:
		e.add(name, OK, detail, "")
	}
	return nil
}
