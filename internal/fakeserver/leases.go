package fakeserver

import (
	"context"
	"database/sql/driver"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"

	"github.com/mysqllock/mysqllock/internal/lockname"
)

var (
	changed   = regexp.MustCompile(`SELECT x'([0-9a-f]*)'(?: AS n)?, (\d+)(?: AS k)?, (\d+)(?: AS ttl)?`)
	leftBy    = regexp.MustCompile(`IF\(d\.ttl > 0, x'([0-9a-f]*)'`)
	namespace = regexp.MustCompile(`namespace = x'([0-9a-f]*)'`)
	looked    = regexp.MustCompile(`name IN \(([^)]*)\) FOR UPDATE SKIP LOCKED$`)
	askedFor  = regexp.MustCompile(`IF\(` + among + ` AND NOT `)
	pairs     = regexp.MustCompile(`\(x'([0-9a-f]*)', x'([0-9a-f]*)'\)`)
	whether   = regexp.MustCompile(`owner <=> x'([0-9a-f]*)'`)
	granted   = regexp.MustCompile(`token = token \+ \(` + among + `\)`)
	grantedTo = regexp.MustCompile(`owner = IF\(` + among + `, x'([0-9a-f]*)'`)
	ttls      = regexp.MustCompile(`INTERVAL ELT\(FIELD\(name, ([^)]*)\), ([^)]*)\) MICROSECOND`)
	leaves    = regexp.MustCompile(`IS NULL, x'([0-9a-f]*)'`)
	killed    = regexp.MustCompile(`^KILL (CONNECTION|QUERY) (\d+)`)
	adopted   = regexp.MustCompile(` WHERE ID = (\d+) AND `)
	marked    = regexp.MustCompile(`INFO LIKE CONCAT\('%', '(\w+)', '(\w+)', '%'\)`)
)

// among says for which names something is true.
const among = `(TRUE|FALSE|name IN \([^)]*\))`

func isAmong(condition, name string) bool {
	return condition == "TRUE" || strings.Contains(condition, "x'"+name+"'")
}

func micros(text string) time.Duration {
	n, _ := strconv.ParseInt(text, 10, 64)
	return time.Duration(n) * time.Microsecond
}

// doLeases does what is sent for leases once they are held, for several at a time, and for
// those that are in the way. known is false if text is none of it.
func (c *Conn) doLeases(ctx context.Context, text string) (r reply, known bool, err error) {
	k := func() *row { return c.s.row(first(oneName, text)) }
	ours := func(k *row) bool { return k.live() && k.owner == first(ourOwner, text) }
	switch {
	case changed.MatchString(text) && strings.Contains(text, " AS ttl"):
		r, err = c.changeLeases(ctx, text)
	case strings.HasPrefix(text, "SELECT name, token, IF("):
		r.width = 3
		for _, name := range namesIn(text) {
			if k := c.s.row(name); ours(k) {
				r.values = append(r.values, []driver.Value{unhex(name), k.token, k.remaining()})
			}
		}
	case strings.HasPrefix(text, "UPDATE `shop`.`mysqllock` SET token = LAST_INSERT_ID("):
		k := c.s.row(first(unhexed, text))
		if err = c.hold(ctx, k, false, false); err == nil && ours(k) && first(token, text) == strconv.FormatInt(k.token, 10) {
			c.change(k, func() { k.token, k.expires = k.token+1, time.Now().Add(micros(first(lasting, text))) })
			r = reply{affected: 1, id: k.token}
		}
	case strings.Contains(text, "FORCE INDEX (PRIMARY)"):
		r = c.look(text)
	case strings.HasPrefix(text, "INSERT INTO `shop`.`mysqllock` (namespace, name) VALUES"):
		r = c.handoff(text)
	case strings.HasPrefix(text, "SELECT token FROM `shop`.`mysqllock`") && strings.HasSuffix(text, " FOR UPDATE"):
		r.width = 1
		if k := k(); k.owner == first(ourOwner, text) {
			r.values = [][]driver.Value{{k.token}}
		}
	case strings.HasPrefix(text, "SELECT 1 FROM `shop`.`mysqllock`") && strings.HasSuffix(text, " LOCK IN SHARE MODE"):
		r.width = 1
		if err = c.hold(ctx, k(), true, false); err == nil && k().live() {
			r.values = [][]driver.Value{{int64(1)}}
		}
	case strings.Contains(text, "*/ 1 FROM `shop`.`mysqllock`"):
		if err = c.hold(ctx, k(), false, false); err == nil {
			r, err = one(int64(1))
		}
	case strings.HasSuffix(text, " ON DUPLICATE KEY UPDATE owner = NULL"):
		k := k()
		if k.blocked(c, false) {
			return r, true, notNow()
		}
		if k.owner == first(ourOwner, text) && first(token, text) == strconv.FormatInt(k.token, 10) {
			c.change(k, func() { k.owner = "" })
			r.affected = 2
		}
	case killed.MatchString(text):
		m := killed.FindStringSubmatch(text)
		id, _ := strconv.ParseInt(m[2], 10, 64)
		switch other := c.s.conns[id]; {
		case other == nil:
			err = &mysql.MySQLError{Number: 1094, Message: "Unknown thread id: " + m[2]}
		case m[1] == "CONNECTION":
			other.lose()
		case other.text != "":
			other.text = ""
			close(other.stop)
		}
	default:
		return r, false, nil
	}
	return r, true, err
}

// running finds the connections whose waiting statement has the mark in text, or the one with
// the id in text. Others need not be killed: they answer.
func (c *Conn) running(text string) reply {
	r := reply{width: 1}
	if id, _ := strconv.ParseInt(first(adopted, text), 10, 64); c.s.conns[id] != nil {
		r.values = [][]driver.Value{{id}}
	}
	if m := marked.FindStringSubmatch(text); m != nil {
		for id, other := range c.s.conns {
			if strings.Contains(other.text, m[1]+m[2]) {
				r.values = append(r.values, []driver.Value{id})
			}
		}
	}
	return r
}

// changeLeases renews leases, touches them, or gives them back.
func (c *Conn) changeLeases(ctx context.Context, text string) (r reply, err error) {
	for _, m := range changed.FindAllStringSubmatch(text, -1) {
		k, ttl := c.s.row(m[1]), micros(m[3])
		if strings.Contains(text, "SKIP LOCKED") && k.blocked(c, false) {
			continue
		}
		if err := c.hold(ctx, k, false, false); err != nil {
			return r, err
		}
		if !k.live() || k.owner != first(ourOwner, text) || m[2] != strconv.FormatInt(k.token, 10) {
			continue
		}
		r.affected += 2
		c.change(k, func() {
			switch {
			case strings.HasSuffix(text, "INTERVAL 1 MICROSECOND"):
			case !leftBy.MatchString(text):
				k.expires = time.Now().Add(ttl)
			case ttl > 0:
				k.owner, k.expires = first(leftBy, text), time.Now().Add(ttl)
			default:
				k.owner = ""
			}
		})
	}
	return r, nil
}

// look locks the rows that nobody has locked, and says what becomes of requests for their
// leases.
func (c *Conn) look(text string) reply {
	r := reply{width: 5}
	space := unhex(first(namespace, text))
	for _, m := range literals.FindAllStringSubmatch(first(looked, text), -1) {
		k := c.s.row(m[1])
		if k.blocked(c, false) {
			continue
		}
		k.holder = c
		found := "0"
		if isAmong(first(askedFor, text), m[1]) && !k.live() {
			wake := lockname.OfWakeUp(space, unhex(m[1]))
			if c.s.named[wake] == nil {
				c.s.named[wake] = &named{c, make(chan struct{})}
			}
			if found = "1"; c.s.named[wake].holder == c {
				found = "2"
			}
		}
		r.values = append(r.values, []driver.Value{unhex(m[1]), k.token, number(k.owner == first(whether, text)), k.remaining(), found})
	}
	return r
}

// handoff grants leases, and gives others back.
func (c *Conn) handoff(text string) (r reply) {
	lasts := func(name string) time.Duration {
		if m := ttls.FindStringSubmatch(text); m != nil {
			i := slices.Index(strings.Split(m[1], ", "), "x'"+name+"'")
			return micros(strings.Split(m[2], ", ")[i])
		}
		return micros(first(lasting, text))
	}
	for _, m := range pairs.FindAllStringSubmatch(text, -1) {
		k := c.s.row(m[2])
		r.affected += 2
		if isAmong(first(granted, text), m[2]) {
			c.change(k, func() {
				k.token, k.owner, k.expires = k.token+1, grantedTo.FindStringSubmatch(text)[2], time.Now().Add(lasts(m[2]))
			})
			continue
		}
		c.change(k, func() { k.owner = "" })
		wake := lockname.OfWakeUp(unhex(m[1]), unhex(m[2]))
		if n := c.s.named[wake]; n != nil && n.holder == c {
			c.unname(wake)
		}
	}
	return r
}
