package mysqllock

import (
	"fmt"
	"strings"
)

// byMethod has the methods of sql.DB that do what parameters of earlier versions did.
var byMethod = map[string]string{"connMaxIdleTime": "SetConnMaxIdleTime", "connMaxLifetime": "SetConnMaxLifetime"}

// checkUnknown returns an error if a DSN parameter that neither driver knows was meant for this
// one: if it is like one of ours, or begins as they do.
//
// It may be a system variable. The name of one is a word, such as autocommit, or has other
// characters, too. Those that are words are few, and not like ours. Of the others a server may
// have any, so they are refused only if they spell one of ours, as max_conns does. The case of
// letters tells little: a server takes AutoCommit, too.
func checkUnknown(name string) error {
	if strings.Contains(name, "@") {
		return nil // a variable of the user's, or the rest of a password
	}
	if method, ok := byMethod[name]; ok {
		return fmt.Errorf("mysqllock: %s is no DSN parameter; use db.%s, which works with maxConns", name, method)
	}
	plain := plainName(name)
	word := strings.Trim(plain, "abcdefghijklmnopqrstuvwxyz0123456789") == "" && !strings.ContainsAny(name, "_-")
	nearest, least := "", 0
	for _, p := range parameters {
		ours := plainName(p.name)
		off := edits(plain, ours)
		like := off == 0 || word && (off <= 2 || contains(plain, ours))
		if like && (nearest == "" || off < least) {
			nearest, least = p.name, off
		}
	}
	switch {
	case nearest != "":
	case len(name) > 4 && (word && len(plain) > 4 && plain[:4] == "lock" || name[:4] == "lock" && name[4] >= 'A' && name[4] <= 'Z'):
		var names []string
		for _, p := range parameters {
			names = append(names, p.name)
		}
		nearest = oneOf(names)
	default:
		return nil
	}
	return fmt.Errorf("mysqllock: unknown DSN parameter %q, want %s", name, nearest)
}

// plainName is a name without what people spell in different ways, and without the white space
// of a DSN that is written on several lines.
func plainName(name string) string {
	return strings.NewReplacer("_", "", "-", "", " ", "", "\t", "", "\n", "").Replace(strings.ToLower(name))
}

// contains reports whether name has the letters of ours in their order, as maxOpenConns has
// those of maxConns.
func contains(name, ours string) bool {
	for i := range len(name) {
		if ours != "" && name[i] == ours[0] {
			ours = ours[1:]
		}
	}
	return ours == ""
}

// edits returns how many characters must be changed, put in or left out to make b of a (the
// Levenshtein distance).
func edits(a, b string) int {
	row := make([]int, len(b)+1) // the distances between the start of a so far, and each start of b
	for j := range row {
		row[j] = j
	}
	for i := range len(a) {
		diagonal := row[0]
		row[0] = i + 1
		for j := range len(b) {
			replaced := diagonal
			if a[i] != b[j] {
				replaced++
			}
			diagonal = row[j+1]
			row[j+1] = min(replaced, row[j]+1, row[j+1]+1)
		}
	}
	return row[len(b)]
}
