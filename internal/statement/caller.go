package statement

import (
	"context"
	"runtime"
	"slices"
	"strings"
	"sync"
)

// database/sql does not say what it calls the driver for; its stack does: the innermost functions of
// database/sql in a row are those of this call. (A callback of Conn.Raw may call other handles.)

// ForOne reports whether database/sql calls the driver for a sql.Conn, or prepares a statement for a
// sql.Tx: for one connection, and not for any.
func ForOne() bool { return over("(*Conn).", "(*Tx).Prepare") }

// ForQueue reports whether database/sql opens a connection for a caller that queues for one.
func ForQueue() bool { return over("(*DB).openNewConnection") }

// Retried reports whether database/sql tries again on driver.ErrBadConn: not for a sql.Conn,
// and not for a prepared statement, which may be of one, unless ctx is of OnAny.
func Retried(ctx context.Context) bool {
	return over("(*DB).retry") && (ctx.Value(onAny{}) != nil || !over("(*Stmt)."))
}

type onAny struct{}

// OnAny returns the context of a prepared statement that database/sql may run on any connection:
// its stack does not say so.
func OnAny(ctx context.Context) context.Context { return context.WithValue(ctx, onAny{}, true) }

// over reports whether one of database/sql's functions of this call has one of the
// prefixes.
func over(prefixes ...string) bool {
	var pcs [64]uintptr
	within := false
	for _, pc := range pcs[:runtime.Callers(2, pcs[:])] {
		name, inSQL := strings.CutPrefix(function(pc), "database/sql.")
		switch {
		case inSQL && slices.ContainsFunc(prefixes, func(prefix string) bool { return strings.HasPrefix(name, prefix) }):
			return true
		case within && !inSQL:
			return false
		}
		within = inSQL
	}
	return false
}

// functions has the names of functions by the places in them that were seen on a stack: to look one up
// costs more than the rest of the walk.
var functions sync.Map

// function is the name of the function that pc is in, which is from [runtime.Callers]: that has one
// for each function, also for those that were inlined.
func function(pc uintptr) string {
	if name, ok := functions.Load(pc); ok {
		return name.(string)
	}
	f, _ := runtime.CallersFrames([]uintptr{pc}).Next()
	functions.Store(pc, f.Function)
	return f.Function
}

// Caller returns the import path of the package that calls the function of the driver which calls
// Caller: that of a wrapper of drivers; "" for database/sql itself.
func Caller() string {
	var pcs [1]uintptr
	runtime.Callers(3, pcs[:])
	name := function(pcs[0])
	dir := strings.LastIndexByte(name, '/') + 1
	pkg, _, _ := strings.Cut(name[dir:], ".")
	if name = name[:dir] + pkg; name == "database/sql" {
		return ""
	}
	return name
}

// InRaw reports whether a callback of Conn.Raw calls the driver.
func InRaw() bool {
	var pcs [64]uintptr
	for _, pc := range pcs[:runtime.Callers(2, pcs[:])] {
		if name, inSQL := strings.CutPrefix(function(pc), "database/sql."); inSQL {
			return strings.HasPrefix(name, "(*Conn).Raw")
		}
	}
	return false
}
