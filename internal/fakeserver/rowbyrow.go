package fakeserver

import (
	"context"
	"database/sql/driver"
	"regexp"
	"strings"
	"time"
)

var (
	rowUpdate = regexp.MustCompile("^UPDATE `shop`.`mysqllock` SET ")
	rowSelect = regexp.MustCompile("^SELECT (token, IF|owner = |name, ).* FROM `shop`.`mysqllock`$")
	lockEnds  = regexp.MustCompile(` FOR UPDATE( NOWAIT)?$`)
)

// goesRowByRow reports whether text is sent for leases where there are no named locks: it locks
// rows, and changes them if they are as the condition says.
func (c *Conn) goesRowByRow(text string) bool {
	if c.s.engine.Lacks == nil && !strings.Contains(c.s.engine.Variable, "TiDB") {
		return false
	}
	what, _, _ := strings.Cut(text, " WHERE ")
	changes := rowUpdate.MatchString(text) && !strings.Contains(text, "_LOCK(") && !strings.Contains(text, "LAST_INSERT_ID(")
	return changes || lockEnds.MatchString(text) && rowSelect.MatchString(what)
}

// doRowByRow does what goes row by row.
func (c *Conn) doRowByRow(ctx context.Context, text string) (r reply, err error) {
	c.implicit()
	what, where, _ := strings.Cut(text, " WHERE ")
	names := namesIn(where)
	if names == nil {
		names = []string{first(oneName, where)}
	}
	for _, name := range names {
		k := c.s.row(name)
		if err := c.hold(ctx, k, false, strings.HasSuffix(text, "NOWAIT")); err != nil {
			return r, err
		}
		if !k.fits(where) {
			continue
		}
		r.affected++
		if rowUpdate.MatchString(what) {
			c.change(k, func() { k.set(what) })
		} else {
			r.values = append(r.values, k.columns(name, what))
		}
	}
	if r.width = 2; strings.HasPrefix(what, "SELECT owner = ") {
		r.width = 1
	}
	if !c.open {
		c.end(true)
	}
	return r, nil
}

// fits reports whether the row is as the condition says, beside its name.
func (r *row) fits(where string) bool {
	owner, token := first(ourOwner, where), first(token, where)
	return r.made && (owner == "" || owner == r.owner) && (token == "" || r.hasToken(token)) &&
		(!strings.Contains(where, "expires > ") || r.live())
}

// columns are what a SELECT asks for.
func (r *row) columns(name, what string) []driver.Value {
	switch {
	case strings.HasPrefix(what, "SELECT name, "):
		return []driver.Value{unhex(name), r.token}
	case strings.HasPrefix(what, "SELECT owner = "):
		return []driver.Value{number(r.owner == first(ourOwner, what))}
	}
	return []driver.Value{r.token, r.remaining()}
}

// set does what an UPDATE sets in the row.
func (r *row) set(what string) {
	if strings.Contains(what, "token = token + 1") {
		r.token++
	}
	if strings.Contains(what, "owner = ") {
		r.owner = first(ourOwner, what)
	}
	if lasts := first(lasting, what); lasts != "" {
		r.expires = time.Now().Add(micros(lasts))
	}
}
