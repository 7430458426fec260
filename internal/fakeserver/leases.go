package fakeserver

import (
	"context"
	"database/sql/driver"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

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

// ofLeases are sent for leases once they are held, for several at a time, and for those that
// are in the way.
var ofLeases = statements{
	{both(changed.MatchString, contains(" AS ttl")), (*Conn).changeLeases},
	{begins("SELECT name, token, IF("), atOnce((*Conn).live)},
	{begins("UPDATE `shop`.`mysqllock` SET token = LAST_INSERT_ID("), (*Conn).handOver},
	{contains("FORCE INDEX (PRIMARY)"), atOnce((*Conn).look)},
	{begins("INSERT INTO `shop`.`mysqllock` (namespace, name) VALUES"), atOnce((*Conn).handoff)},
	{both(begins("SELECT token FROM `shop`.`mysqllock`"), ends(" FOR UPDATE")), atOnce((*Conn).granted)},
	{both(begins("SELECT 1 FROM `shop`.`mysqllock`"), ends(" LOCK IN SHARE MODE")), (*Conn).isLive},
	{contains("*/ 1 FROM `shop`.`mysqllock`"), (*Conn).lockOne},
	{ends(" ON DUPLICATE KEY UPDATE owner = NULL"), (*Conn).clear},
}

// leased reports whether the lease that text is about is live, of the owner in text.
func (r *row) leased(text string) bool { return r.live() && r.owner == first(ourOwner, text) }

// hasToken reports whether the row has that token.
func (r *row) hasToken(token string) bool { return token == strconv.FormatInt(r.token, 10) }

// live tells which of several leases the owner in text still has.
func (c *Conn) live(text string) reply {
	r := reply{width: 3}
	for _, name := range namesIn(text) {
		if k := c.s.row(name); k.leased(text) {
			r.values = append(r.values, []driver.Value{unhex(name), k.token, k.remaining()})
		}
	}
	return r
}

// handOver turns a lease into the next one of its owner.
func (c *Conn) handOver(ctx context.Context, text string) (reply, error) {
	k := c.s.row(first(unhexed, text))
	if err := c.hold(ctx, k, false, false); err != nil || !k.leased(text) || !k.hasToken(first(token, text)) {
		return reply{}, err
	}
	c.change(k, func() { k.token, k.expires = k.token+1, time.Now().Add(micros(first(lasting, text))) })
	return reply{affected: 1, id: k.token}, nil
}

// granted tells the token of a lease that the owner in text has been granted.
func (c *Conn) granted(text string) reply {
	r := reply{width: 1}
	if k := c.s.row(first(oneName, text)); k.owner == first(ourOwner, text) {
		r.values = [][]driver.Value{{k.token}}
	}
	return r
}

// isLive tells whether anybody has a lease, once nobody is changing that.
func (c *Conn) isLive(ctx context.Context, text string) (reply, error) {
	r, k := reply{width: 1}, c.s.row(first(oneName, text))
	err := c.hold(ctx, k, true, false)
	if err == nil && k.live() {
		r.values = [][]driver.Value{{int64(1)}}
	}
	return r, err
}

// lockOne waits for the row of a lease.
func (c *Conn) lockOne(ctx context.Context, text string) (reply, error) {
	if err := c.hold(ctx, c.s.row(first(oneName, text)), false, false); err != nil {
		return reply{}, err
	}
	return one(int64(1))
}

// clear removes an expired lease from its row.
func (c *Conn) clear(_ context.Context, text string) (r reply, err error) {
	k := c.s.row(first(oneName, text))
	if k.blocked(c, false) {
		return r, notNow()
	}
	if k.owner == first(ourOwner, text) && k.hasToken(first(token, text)) {
		c.change(k, func() { k.owner = "" })
		r.affected = 2
	}
	return r, nil
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
		if !k.leased(text) || !k.hasToken(m[2]) {
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
		ours := number(k.owner == first(whether, text))
		r.values = append(r.values, []driver.Value{unhex(m[1]), k.token, ours, k.remaining(), found})
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
