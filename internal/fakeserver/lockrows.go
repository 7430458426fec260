package fakeserver

import (
	"cmp"
	"context"
	"database/sql/driver"
	"encoding/hex"
	"fmt"
	"maps"
	"regexp"
	"slices"
	"strconv"
	"strings"
	"time"

	"github.com/go-sql-driver/mysql"
)

// row is a row of the lock table.
type row struct {
	made      bool // it is there
	token     int64
	owner     string // in hexadecimal; "" is NULL
	expires   time.Time
	versioned bool
	holder    *Conn          // that has locked it alone
	shared    map[*Conn]bool // that have locked it together
	freed     chan struct{}  // closed when a holder ends its transaction
}

func (r *row) live() bool { return r.owner != "" && r.expires.After(time.Now()) }

func (r *row) remaining() int64 {
	if !r.live() {
		return 0
	}
	return time.Until(r.expires).Microseconds()
}

func (r *row) ownerValue() driver.Value {
	if r.owner == "" {
		return nil
	}
	return unhex(r.owner)
}

// blocked reports whether another connection keeps c from locking the row.
func (r *row) blocked(c *Conn, shared bool) bool {
	others := len(r.shared)
	if r.shared[c] {
		others--
	}
	return r.holder != nil && r.holder != c || !shared && others > 0
}

// holders are the connections that have locked the row.
func (r *row) holders() []*Conn {
	all := slices.Collect(maps.Keys(r.shared))
	if r.holder != nil {
		all = append(all, r.holder)
	}
	return all
}

// awaitedBy reports whether a holder of the row, other than c, waits for c, itself or through
// others.
func (r *row) awaitedBy(c *Conn) bool {
	seen := map[*Conn]bool{c: true}
	var waits func(r *row) bool
	waits = func(r *row) bool {
		return slices.ContainsFunc(r.holders(), func(h *Conn) bool {
			if seen[h] || h.awaits == nil {
				return false
			}
			seen[h] = true
			return h.awaits.holder == c || h.awaits.shared[c] || waits(h.awaits)
		})
	}
	return waits(r)
}

// rowHolder tells who has locked one of the rows in text.
func (c *Conn) rowHolder(text string) reply {
	waiter := first(otherThan, text)
	for _, m := range lockData.FindAllStringSubmatch(text, -1) {
		for _, h := range c.s.row(strings.ToLower(m[1])).holders() {
			if h.awaits == nil && strconv.FormatInt(h.id, 10) != waiter {
				r, _ := one(h.id, "", "", h.owner, time.Since(h.began).Microseconds())
				return r
			}
		}
	}
	return reply{width: 5}
}

// Holders are those who have the key: as row lock, lease or slot in rows that have one of the
// names, or as the named lock.
func (s *Server) Holders(isRow func(name string) bool, named string) (owners []string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, r := range s.rows {
		if !isRow(unhex(name)) {
			continue
		}
		if r.live() {
			owners = append(owners, unhex(r.owner))
		}
		for _, h := range r.holders() {
			owners = append(owners, h.owner)
		}
	}
	if n := s.named[named]; n != nil {
		owners = append(owners, n.holder.owner)
	}
	return owners
}

// Lose takes the key from those who have it, as [Server.Holders] finds them: connections that
// have locked it are lost, and leases have expired and were somebody else's since.
func (s *Server) Lose(isRow func(name string) bool, named string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for name, r := range s.rows {
		if !isRow(unhex(name)) {
			continue
		}
		for _, h := range r.holders() {
			h.lose()
		}
		if r.live() {
			r.owner = ""
			r.token++
		}
	}
	if n := s.named[named]; n != nil {
		n.holder.lose()
	}
}

// Remove removes the row of a key, as a clean-up does.
func (s *Server) Remove(key string) {
	s.mu.Lock()
	defer s.mu.Unlock()
	s.row(hex.EncodeToString([]byte(key))).made = false
}

// Lease gives somebody else a lease on a key, which ends after that time.
func (s *Server) Lease(key string, after time.Duration) {
	s.mu.Lock()
	defer s.mu.Unlock()
	r := s.row(hex.EncodeToString([]byte(key)))
	r.made, r.token, r.owner, r.expires = true, r.token+1, hex.EncodeToString([]byte("web-2:7:shopd#0a1b2c3d")), time.Now().Add(after)
}

// Steal gives every lease to another owner, as after it had expired.
func (s *Server) Steal() { s.each(func(r *row) { r.owner = "ff"; r.token++ }) }

// Change raises the version of every key, as the commit of another process does.
func (s *Server) Change() { s.each(func(r *row) { r.token++ }) }

func (s *Server) each(change func(*row)) {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, r := range s.rows {
		change(r)
	}
}

// Leases counts the leases that are live.
func (s *Server) Leases() (n int) {
	s.each(func(r *row) {
		if r.live() {
			n++
		}
	})
	return n
}

func unhex(text string) string {
	var b strings.Builder
	for ; len(text) > 1; text = text[2:] {
		n, _ := strconv.ParseUint(text[:2], 16, 8)
		b.WriteByte(byte(n))
	}
	return b.String()
}

// row is the row with that name, in hexadecimal.
func (s *Server) row(name string) *row {
	if s.rows[name] == nil {
		s.rows[name] = &row{shared: make(map[*Conn]bool), freed: make(chan struct{})}
	}
	return s.rows[name]
}

var (
	lockedNames = regexp.MustCompile(`name = (?:x|UNHEX\(CONVERT\()'([0-9a-f]*)'(?: USING ascii\)\))? LIMIT 1 FOR (UPDATE|SHARE)`)
	listed      = regexp.MustCompile(`name IN \(([^)]*)\)`)
	literals    = regexp.MustCompile(`x'([0-9a-f]*)'`)
	oneName     = regexp.MustCompile(`name = x'([0-9a-f]*)'`)
	compared    = regexp.MustCompile(`SELECT x'([0-9a-f]*)'(?: AS n)?, (\d+)`)
	candidates  = regexp.MustCompile(`SELECT (\d+)(?: AS i)?, x'([0-9a-f]*)'`)
	newOwner    = regexp.MustCompile(`owner = IF\(\S+ <> s\.token, x'([0-9a-f]*)'`)
	ourOwner    = regexp.MustCompile(`owner = x'([0-9a-f]*)'`)
	token       = regexp.MustCompile(`token = (\d+)`)
	unhexed     = regexp.MustCompile(`UNHEX\(CONVERT\('([0-9a-f]*)'`)
	usedName    = regexp.MustCompile(`IS_USED_LOCK\('([^']*)'`)
	givenName   = regexp.MustCompile(`RELEASE_LOCK\('([^']*)'`)
	inTurn      = regexp.MustCompile(` >= (\d)`)
	otherThan   = regexp.MustCompile(`t\.PROCESSLIST_ID <> (\d+)`)
	lockData    = regexp.MustCompile(`'0x[0-9A-F]*, 0x([0-9A-F]*)'`)
	fence       = regexp.MustCompile(`^SELECT (?:/\*\+.*?\*/ )?IF\(MAX\(r\.token = (\d+) AND r\.owner = x'([0-9a-f]*)'` +
		` AND .* LIMIT 1 (FOR UPDATE|FOR SHARE|LOCK IN SHARE MODE)`)
	lasting = regexp.MustCompile(`INTERVAL (\d+) MICROSECOND`)
)

func first(what *regexp.Regexp, text string) string {
	if m := what.FindStringSubmatch(text); m != nil {
		return m[1]
	}
	return ""
}

// filled is a prepared statement with its values, as it is where it is not prepared.
func filled(text string, args []driver.NamedValue) string {
	for _, a := range args {
		value := fmt.Sprint(a.Value)
		if _, ok := a.Value.(string); ok {
			value = "'" + value + "'"
		}
		text = strings.Replace(text, "?", value, 1)
	}
	return text
}

// exist tells which rows there are, beside the high-water row.
func (c *Conn) exist(text string) reply {
	r, _ := one("", int64(0))
	for _, name := range namesIn(text) {
		if k := c.s.rows[name]; k != nil && k.made {
			r.values = append(r.values, []driver.Value{unhex(name), k.token})
		}
	}
	r.width = 2
	return r
}

// tells is the answer of a statement that has locked a row.
func (c *Conn) tells(k *row) reply {
	r := reply{width: 6}
	if k.made {
		r.values = [][]driver.Value{{c.id, k.token, k.ownerValue(), number(k.versioned), "0", "0"}}
	}
	return r
}

// lock locks the rows that text names. It lets go of the mutex while it waits.
func (c *Conn) lock(ctx context.Context, text string) (reply, error) {
	c.implicit()
	r := reply{width: 6}
	for _, m := range lockedNames.FindAllStringSubmatch(text, -1) {
		k := c.s.row(m[1])
		if err := c.hold(ctx, k, m[2] == "SHARE", strings.Contains(text, "NOWAIT")); err != nil {
			return reply{}, err
		}
		r.values = append(r.values, c.tells(k).values...)
	}
	return r, nil
}

// hold locks one row, until the transaction ends.
func (c *Conn) hold(ctx context.Context, k *row, shared, nowait bool) error {
	for k.blocked(c, shared) {
		if nowait {
			return notNow()
		}
		if c.awaits = k; k.awaitedBy(c) {
			c.awaits = nil
			c.end(false)
			return deadlocked()
		}
		err := c.await(ctx, k.freed)
		c.awaits = nil
		if err != nil {
			return err
		}
	}
	switch {
	case !c.open:
	case shared && k.holder == nil:
		k.shared[c] = true
	default:
		k.holder = c
	}
	return nil
}

// await waits until something is free. A context that ends takes the connection with it.
func (c *Conn) await(ctx context.Context, freed <-chan struct{}) error {
	c.s.announce("waits")
	if f := c.s.fault("waits"); f != nil {
		return f.err
	}
	c.stop = make(chan struct{})
	stop := c.stop
	c.s.mu.Unlock()
	defer c.s.mu.Lock()
	select {
	case <-freed:
		return nil
	case <-c.lost:
		return mysql.ErrInvalidConn
	case <-stop:
		return interrupted("Query execution was interrupted")
	case <-ctx.Done():
		c.s.mu.Lock()
		defer c.s.mu.Unlock()
		c.lose()
		return ctx.Err()
	}
}

// change changes a row so that a rollback undoes it. Without a transaction it stays.
func (c *Conn) change(k *row, to func()) {
	token, owner, expires, versioned := k.token, k.owner, k.expires, k.versioned
	if c.open {
		c.undo = append(c.undo, func() { k.token, k.owner, k.expires, k.versioned = token, owner, expires, versioned })
	}
	to()
}

// named are the names in the list of text.
func namesIn(text string) (names []string) {
	if m := listed.FindStringSubmatch(text); m != nil {
		for _, l := range literals.FindAllStringSubmatch(m[1], -1) {
			names = append(names, l[1])
		}
	}
	return names
}

// ofRows are about rows of the lock table.
var ofRows = statements{
	{lockedNames.MatchString, (*Conn).lock},
	{begins("SELECT name, token FROM `shop`.`mysqllock`"), atOnce((*Conn).exist)},
	{begins("INSERT IGNORE INTO `shop`.`mysqllock`"), atOnce((*Conn).makeRows)},
	{begins("SELECT i FROM ("), atOnce((*Conn).free)},
	{contains("@@transaction_isolation, name, token"), atOnce((*Conn).versions)},
	{begins("SELECT name, IF((owner IS NOT NULL"), atOnce((*Conn).owners)},
	{contains("ON DUPLICATE KEY UPDATE token = r.token + 1"), (*Conn).compare},
	{begins("UPDATE `shop`.`mysqllock` SET token = token + 1, expires"), atOnce((*Conn).raise)},
	{contains("LAST_INSERT_ID(`shop`.`mysqllock`.token + 1)"), (*Conn).lease},
	{begins("UPDATE `shop`.`mysqllock` SET owner = IF(RELEASE_LOCK(", "UPDATE `shop`.`mysqllock` SET owner = NULL"), atOnce((*Conn).unlease)},
	{begins("SELECT owner FROM `shop`.`mysqllock` WHERE"), atOnce((*Conn).leaseholder)},
	{begins("SELECT released, CAST(UTC_TIMESTAMP(6) AS CHAR) FROM `shop`.`mysqllock` WHERE"), none(2)}, // nobody has taken it away
}

// makeRows makes rows.
func (c *Conn) makeRows(text string) reply {
	for _, name := range literals.FindAllStringSubmatch(text[strings.Index(text, " JOIN "):], -1) {
		c.s.row(name[1]).made = true
	}
	return reply{affected: 1}
}

// versions tells the versions of rows.
func (c *Conn) versions(text string) reply {
	r := reply{width: 6}
	for _, name := range namesIn(text) {
		k := c.s.row(name)
		prepared := number(k.versioned && k.owner == "")
		r.values = append(r.values, []driver.Value{"REPEATABLE-READ", unhex(name), k.token, prepared, k.remaining(), k.ownerValue()})
	}
	return r
}

// owners tells who has the leases of rows.
func (c *Conn) owners(text string) reply {
	r := reply{width: 4}
	for _, name := range namesIn(text) {
		k := c.s.row(name)
		r.values = append(r.values, []driver.Value{unhex(name), k.remaining(), k.token, k.ownerValue()})
	}
	return r
}

// leaseholder tells who has the lease of a row.
func (c *Conn) leaseholder(text string) reply {
	r := reply{width: 1}
	if k := c.s.row(first(oneName, text)); k.live() {
		r.values = [][]driver.Value{{k.ownerValue()}}
	}
	return r
}

// raise raises the version of a row.
func (c *Conn) raise(text string) reply {
	k := c.s.row(oneName.FindStringSubmatch(text)[1])
	c.change(k, func() { k.token++ })
	return reply{affected: 1}
}

// free finds one of the slots that nobody has locked.
func (c *Conn) free(text string) reply {
	for _, m := range candidates.FindAllStringSubmatch(text, -1) {
		if k := c.s.row(m[2]); !k.live() && !k.blocked(c, false) {
			return reply{width: 1, values: [][]driver.Value{{m[1]}}}
		}
	}
	return reply{width: 1}
}

// compare compares versions and sets the next ones, or prepares a row.
func (c *Conn) compare(_ context.Context, text string) (r reply, err error) {
	if !strings.Contains(text, "d.v AND") {
		k := c.s.row(oneName.FindStringSubmatch(text)[1])
		if k.blocked(c, false) {
			return r, notNow()
		}
		if k.live() || k.versioned && k.owner == "" {
			return r, nil
		}
		c.change(k, func() { k.token, k.owner, k.versioned = k.token+1, "", true })
		return reply{affected: 2}, nil
	}
	for _, m := range compared.FindAllStringSubmatch(text, -1) {
		k := c.s.row(m[1])
		if is, _ := strconv.ParseInt(m[2], 10, 64); is != k.token || !k.versioned || k.owner != "" {
			continue
		}
		if k.blocked(c, false) {
			return r, notNow()
		}
		if c.open {
			k.holder = c
		}
		c.change(k, func() { k.token++ })
		r.affected += 2
	}
	return r, nil
}

const noToken = int64(1) << 62

// lease takes a lease, if nobody has it.
func (c *Conn) lease(_ context.Context, text string) (reply, error) {
	k, wake := c.s.row(first(unhexed, text)), first(usedName, text)
	switch n := c.s.named[wake]; {
	case k.blocked(c, false):
		return reply{}, notNow()
	case k.live():
		return reply{id: noToken + k.remaining(), affected: 2}, nil
	case n != nil && n.holder != c && first(inTurn, text) == "1":
		return reply{id: noToken, affected: 2}, nil
	case n == nil:
		c.s.named[wake] = &named{c, make(chan struct{})}
	}
	micros, _ := strconv.ParseInt(first(lasting, text), 10, 64)
	k.token++
	k.owner = first(newOwner, text)
	k.expires = time.Now().Add(time.Duration(micros) * time.Microsecond)
	return reply{id: k.token, affected: 2}, nil
}

// unlease gives a lease back, and its wake-up lock where text has that.
func (c *Conn) unlease(text string) reply {
	k := c.s.row(cmp.Or(first(unhexed, text), first(oneName, text)))
	owner, wake := ourOwner.FindAllStringSubmatch(text, -1), first(givenName, text)
	if !k.hasToken(first(token, text)) || k.owner != owner[len(owner)-1][1] {
		return reply{}
	}
	c.change(k, func() {
		k.owner = first(leaves, text)
		if k.owner != "" { // it stays for a while
			k.expires = time.Now().Add(micros(first(lasting, text)))
		}
	})
	if n := c.s.named[wake]; n != nil && n.holder == c {
		c.unname(wake)
	}
	return reply{affected: 1}
}

// fence locks the row of a lease, and stops where the lease is not held.
func (c *Conn) fence(ctx context.Context, text string) (reply, error) {
	c.implicit()
	of, k := fence.FindStringSubmatch(text), c.s.row(first(oneName, text))
	if err := c.hold(ctx, k, of[3] != "FOR UPDATE", false); err != nil {
		return reply{}, err
	}
	if !k.hasToken(of[1]) || of[2] != k.owner || !k.live() {
		return reply{}, stopped()
	}
	return one(int64(1))
}
