package fakeserver

import (
	"context"
	"database/sql/driver"
	"regexp"
	"strconv"
	"strings"
	"time"
)

// doRowByRow does what is sent for leases where there are no named locks: statements that lock
// rows, and change them if they are as the condition says.
func (c *Conn) doRowByRow(ctx context.Context, text string) (r reply, known bool, err error) {
	what, where, _ := strings.Cut(text, " WHERE ")
	changes := strings.HasPrefix(text, "UPDATE `shop`.`mysqllock` SET ") && !strings.Contains(text, "_LOCK(") && !strings.Contains(text, "LAST_INSERT_ID(")
	locks := regexp.MustCompile(` FOR UPDATE( NOWAIT)?$`).MatchString(text) &&
		regexp.MustCompile("^SELECT (token, IF|owner = |name, ).* FROM `shop`.`mysqllock`$").MatchString(what)
	if c.s.engine.Lacks == nil && !strings.Contains(c.s.engine.Variable, "TiDB") || !changes && !locks {
		return r, false, nil
	}
	c.implicit()
	names := namesIn(where)
	if names == nil {
		names = []string{first(oneName, where)}
	}
	for _, name := range names {
		k := c.s.row(name)
		if err := c.hold(ctx, k, false, strings.HasSuffix(text, "NOWAIT")); err != nil {
			return r, true, err
		}
		owner, of := first(ourOwner, where), first(token, where)
		if !k.made || owner != "" && owner != k.owner || of != "" && of != strconv.FormatInt(k.token, 10) || strings.Contains(where, "expires > ") && !k.live() {
			continue
		}
		r.affected++
		switch {
		case changes:
			c.change(k, func() { k.set(what) })
		case strings.HasPrefix(what, "SELECT name, "):
			r.values = append(r.values, []driver.Value{unhex(name), k.token})
		case strings.HasPrefix(what, "SELECT owner = "):
			r.values = append(r.values, []driver.Value{number(k.owner == first(ourOwner, what))})
		default:
			r.values = append(r.values, []driver.Value{k.token, k.remaining()})
		}
	}
	if r.width = 2; strings.HasPrefix(what, "SELECT owner = ") {
		r.width = 1
	}
	if !c.open {
		c.end(true)
	}
	return r, true, nil
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
