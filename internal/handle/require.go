package handle

import (
	"fmt"
	"log/slog"
	"path"
	"runtime"
	"slices"
	"strings"
	"sync"

	"github.com/mysqllock/mysqllock/internal/sqltext"
	"github.com/mysqllock/mysqllock/lockerr"
)

// Required are the tables whose rows may be written only under a lock: see mysqllock.Config.Require.
type Required struct {
	tables []requiredTable
	logs   bool                                    // log mode: a write without its lock is reported once, and runs
	Key    func(table string, keys []string) error // see mysqllock.Config.RequireKey; nil without one

	namesTable func(schema, table string) bool // the method value r.names, made once

	mu       sync.Mutex
	reported map[lack]bool // in log mode
}

// lack is a write that lacks its lock, as an error names it. The statement's text is no part of it: an ORM has
// one text for all places that save a model, and some programs write values into their texts.
type lack struct {
	place, table string
	sentinel     error
}

// requiredTable has patterns in lower case. schema is "" for any schema.
type requiredTable struct{ schema, table string }

// logMode, in front of the tables, says that a write without its lock is reported and not refused.
const logMode = "log:"

// ParseRequired reads the value of lockRequire. It returns nil for "".
func ParseRequired(value string) (*Required, error) {
	if value == "" {
		return nil, nil
	}
	tables, logs := strings.CutPrefix(value, logMode)
	r := &Required{logs: logs, reported: make(map[lack]bool)}
	for name := range strings.SplitSeq(tables, ",") {
		var t requiredTable
		t.table = strings.ToLower(strings.TrimSpace(name))
		if schema, table, found := strings.Cut(t.table, "."); found {
			t.schema, t.table = schema, table
		}
		_, bad := path.Match(t.schema+t.table, "")
		if t.table == "" || bad != nil || strings.ContainsAny(t.table, ".:`\"' ") {
			return nil, fmt.Errorf("mysqllock: lockRequire is %q, want tables or patterns such as products,order_*,shop.stock,"+
				" after log: if nothing is to be refused", value)
		}
		r.tables = append(r.tables, t)
	}
	r.namesTable = r.names
	return r, nil
}

// names reports whether a table is one of r. A text without a schema may mean the table of any schema.
func (r *Required) names(schema, table string) bool {
	return slices.ContainsFunc(r.tables, func(t requiredTable) bool {
		return matches(t.table, table) && (t.schema == "" || schema == "" || matches(t.schema, schema))
	})
}

func matches(pattern, name string) bool {
	if !strings.ContainsAny(pattern, `*?[\`) {
		return strings.EqualFold(pattern, name)
	}
	ok, _ := path.Match(pattern, strings.ToLower(name))
	return ok
}

// Writes returns the first table of r that a text writes; "" if it writes none.
func (r *Required) Writes(text string) string {
	if text != "" && text[0]|0x20 == 's' && sqltext.Quiet(text) { // SELECT
		return ""
	}
	table, sure := sqltext.Writes(text, r.namesTable)
	if !sure {
		return "a table that its text does not tell (take comments like /*! */ out)"
	}
	return table
}

// Unlocked returns lockerr.ErrNoLock for a statement that is to run without a lock, and writes a table that
// needs one. In log mode it returns nil.
func (h *Handle) Unlocked(table string) error {
	err := h.Lacks(lockerr.ErrNoLock, table, "outside of any lock, which lockRequire asks for; "+
		"run it in mysqllock.Do, or in a transaction whose BeginTx has a context of lockctx.With, and with the context that this gives")
	if err == nil {
		return nil
	}
	return &lockerr.Error{Op: "statement", Err: err}
}

// Lacks returns the error of a statement that writes a table without the lock that the table needs. In log mode
// it reports that error instead, once for each place in the code, table and sentinel, and returns nil.
func (h *Handle) Lacks(sentinel error, table, why string) error {
	r, place := h.Settings.Required, caller()
	if r.logs && !r.isNew(lack{place, table, sentinel}) {
		return nil
	}
	err := lockerr.With(sentinel, fmt.Errorf("%s writes %s %s", place, table, why))
	if !r.logs {
		return err
	}
	err = &lockerr.Error{Op: "statement", Err: err}
	if h.Settings.Observe == nil {
		slog.Warn(LacksLock, "error", err.Error())
	} else {
		h.advise(err)
	}
	return nil
}

// LacksLock is the message of log mode in a log.
const LacksLock = "a write lacks its lock"

// mostTold bounds how many lacks are remembered: programs may make tables, and so new names.
const mostTold = 1000

// isNew reports whether l was not reported yet, and remembers it.
func (r *Required) isNew(l lack) bool {
	r.mu.Lock()
	defer r.mu.Unlock()
	if r.reported[l] || len(r.reported) == mostTold {
		return false
	}
	r.reported[l] = true
	return true
}

// beneath are the packages that call the driver on behalf of the application, by the beginnings of their
// functions' names.
var beneath = []string{
	"github.com/mysqllock/mysqllock.", "github.com/mysqllock/mysqllock/internal/", "github.com/mysqllock/mysqllock/intercept.",
	"database/sql.", "runtime.", "reflect.", "slices.", "sync.",
	"gorm.io/", "github.com/jmoiron/sqlx", "github.com/uptrace/bun", "entgo.io/ent", "xorm.io/", "github.com/volatiletech/",
	"github.com/aarondl/",
	"github.com/ngrok/sqlmw", "github.com/XSAM/otelsql", "github.com/qustavo/sqlhooks", "github.com/DataDog/",
}

// caller returns the file and line of the application's code that runs the present statement.
func caller() string {
	pcs := make([]uintptr, 64)
	frames := runtime.CallersFrames(pcs[:runtime.Callers(2, pcs)])
	for {
		f, more := frames.Next()
		isBeneath := slices.ContainsFunc(beneath, func(prefix string) bool { return strings.HasPrefix(f.Function, prefix) })
		if f.File != "" && (strings.HasSuffix(f.File, "_test.go") || !isBeneath) {
			return fmt.Sprintf("%s:%d", f.File, f.Line)
		}
		if !more {
			return "a statement"
		}
	}
}
