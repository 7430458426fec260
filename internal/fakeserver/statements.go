package fakeserver

import (
	"cmp"
	"context"
	"database/sql/driver"
	"errors"
	"regexp"
	"slices"
	"strconv"
	"strings"
)

// doing does a statement, whose text is one of those that it was found for.
type doing func(c *Conn, ctx context.Context, text string) (reply, error)

// statement is a kind of statements that the server knows.
type statement struct {
	is func(text string) bool
	do doing
}

// statements are several kinds. The first one that a text is of counts.
type statements []statement

// doing is what does the statement; nil if it is of none of the kinds.
func (s statements) doing(text string) doing {
	for _, one := range s {
		if one.is(text) {
			return one.do
		}
	}
	return nil
}

// is reports whether a text is one of these.
func is(texts ...string) func(string) bool {
	return func(text string) bool { return slices.Contains(texts, text) }
}

// begins reports whether a text begins with one of these.
func begins(with ...string) func(string) bool {
	return func(text string) bool {
		return slices.ContainsFunc(with, func(start string) bool { return strings.HasPrefix(text, start) })
	}
}

func ends(with string) func(string) bool {
	return func(text string) bool { return strings.HasSuffix(text, with) }
}

func contains(part string) func(string) bool {
	return func(text string) bool { return strings.Contains(text, part) }
}

func both(one, other func(string) bool) func(string) bool {
	return func(text string) bool { return one(text) && other(text) }
}

// atOnce is a statement that waits for nothing, and does not fail.
func atOnce(do func(c *Conn, text string) reply) doing {
	return func(c *Conn, _ context.Context, text string) (reply, error) { return do(c, text), nil }
}

// always is a statement that answers with one row, which is always the same.
func always(values ...driver.Value) doing {
	return func(*Conn, context.Context, string) (reply, error) { return one(values...) }
}

// none is a statement that does nothing, and answers with so many columns, and no rows.
func none(columns int) doing {
	return func(*Conn, context.Context, string) (reply, error) { return reply{width: columns}, nil }
}

// do does a statement.
func (c *Conn) do(ctx context.Context, text string, args []driver.NamedValue) (reply, error) {
	if strings.HasPrefix(text, "SET STATEMENT ") {
		_, text, _ = strings.Cut(text, " FOR ")
	}
	whole := filled(text, args)
	switch {
	case c.goesRowByRow(text):
		return c.doRowByRow(ctx, text)
	case fence.MatchString(text):
		return c.fence(ctx, text)
	}
	if do := ofLeases.doing(whole); do != nil {
		return do(c, ctx, whole)
	}
	if do := ofConnections.doing(text); do != nil {
		return do(c, ctx, text)
	}
	switch clause, reads := strings.CutPrefix(text, read); {
	case reads:
		return c.read(ctx, clause, args[0].Value.(int64))
	case text == "UPDATE p SET stock = ? WHERE id = ?":
		return c.update(args), nil
	}
	if do := ofRows.doing(whole); do != nil {
		return do(c, ctx, whole)
	}
	verb, rest, _ := strings.Cut(text, " ")
	if verb == "DO" || verb == "SELECT" {
		if values, known, err := c.scalars(ctx, rest, args); known {
			return reply{values: [][]driver.Value{values}, width: len(values)}, err
		} else if err != nil {
			return reply{}, err
		}
	}
	c.s.unknown = append(c.s.unknown, text)
	return reply{}, errors.New("fakeserver: what is this? " + text)
}

// ofConnections are about a connection and its transactions, others, and the server.
var ofConnections = statements{
	{begins("SET @mysqllock = "), atOnce((*Conn).setUp)},
	{begins("SET SESSION ", "SET TRANSACTION ISOLATION LEVEL "), none(0)}, // it limits nothing by itself
	{is("SET @a = 1"), none(0)},
	{both(begins("SET "), contains("@@transaction_read_only = @@transaction_read_only")), (*Conn).setNext},
	{begins("SELECT ID FROM (SELECT ID, USER, HOST"), atOnce((*Conn).running)},
	{sought.MatchString, atOnce((*Conn).seek)},
	{killed.MatchString, (*Conn).kill},

	{is("START TRANSACTION", "BEGIN"), atOnce((*Conn).begin)},
	{is("COMMIT", "ROLLBACK"), atOnce((*Conn).endBy)},
	{begins("SAVEPOINT "), atOnce((*Conn).save)},
	{begins("ROLLBACK TO ", "RELEASE SAVEPOINT "), (*Conn).back},
	{is("SELECT @@autocommit"), atOnce((*Conn).commits)},

	{begins("SELECT VERSION()"), (*Conn).probed},
	{begins("SELECT @@version,"), atOnce((*Conn).recognised)},
	{is("SHOW VITESS_SHARDS"), (*Conn).shards},
	{begins("SELECT @@transaction_isolation, @@innodb_rollback_on_timeout"), always("REPEATABLE-READ", int64(0), int64(0))},
	{begins("SELECT @@transaction_isolation, @@tidb_txn_mode"), always("REPEATABLE-READ", int64(0), "0", "0", "28800")},
	{contains("@@completion_type"), atOnce((*Conn).identity)},

	{begins("SELECT ENGINE"), always("InnoDB", "namespace,name,owner,token,expires,versioned")},
	{contains("AND expires BETWEEN"), none(1)}, // no clean-up is under way
	{begins("SELECT 1 FROM `shop`.`mysqllock`"), always(int64(1))},
	{begins("SELECT token FROM `shop`.`mysqllock`"), none(1)}, // no stripes
	{begins("SELECT h.id, p.USER, p.HOST"), atOnce((*Conn).nameHolder)},
	{contains("performance_schema.data_locks"), atOnce((*Conn).rowHolder)},
	{contains("information_schema.INNODB_LOCK_WAITS"), none(5)}, // MariaDB does not say who holds a lock
}

// setUp sets up a connection of the driver's own.
func (c *Conn) setUp(text string) reply {
	c.autocommit = strings.Contains(text, "SESSION autocommit = 1") && !strings.Contains(text, "/*T! , autocommit = 0 */")
	return reply{}
}

// setNext sets a variable of the next transaction, which cannot be set in one.
func (c *Conn) setNext(context.Context, string) (reply, error) {
	if c.open {
		return reply{}, inTransaction()
	}
	return reply{}, nil
}

var (
	sought  = regexp.MustCompile(`^SELECT (\d+) FROM DUAL WHERE \d+ <> CONNECTION_ID\(\)`)
	adopted = regexp.MustCompile(` WHERE ID = (\d+) AND `)
	marked  = regexp.MustCompile(`INFO LIKE CONCAT\('%', '(\w+)', '(\w+)', '%'\)`)
	killed  = regexp.MustCompile(`^KILL (CONNECTION|QUERY) (\d+)`)
)

// seek finds a connection that is to be killed.
func (c *Conn) seek(text string) reply {
	r := reply{width: 1}
	if id, _ := strconv.ParseInt(first(sought, text), 10, 64); c.s.conns[id] != nil {
		r.values = [][]driver.Value{{id}}
	}
	return r
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

// kill ends another connection, or its statement.
func (c *Conn) kill(_ context.Context, text string) (reply, error) {
	m := killed.FindStringSubmatch(text)
	id, _ := strconv.ParseInt(m[2], 10, 64)
	switch other := c.s.conns[id]; {
	case other == nil:
		return reply{}, noSuchThread(m[2])
	case m[1] == "CONNECTION":
		other.lose()
	case other.text != "":
		other.text = ""
		close(other.stop)
	}
	return reply{}, nil
}

// commits tells whether a statement outside of a transaction does.
func (c *Conn) commits(string) reply {
	r, _ := one(number(c.autocommit))
	return r
}

// identity tells which connection it is, and where.
func (c *Conn) identity(string) reply {
	r, _ := one(c.id, "db 3306", int64(1), "NO_CHAIN")
	return r
}

// probed is what the server says of itself to those who ask as MySQL and MariaDB are asked.
func (c *Conn) probed(context.Context, string) (reply, error) {
	e, cluster := c.s.engine, "OFF,"
	if c.s.Product == MariaDB {
		e, cluster = mariaDB, "0,"
	}
	if e.Lacks != nil {
		return reply{}, e.Lacks
	}
	return one(e.Version, "shop", "0", "0", "REPEATABLE-READ", "0", cluster, int64(0), "uuid", int64(0), "28800", int64(0),
		e.Variable, e.Comment)
}

// recognised is what the server says of itself to those who ask as any engine is asked.
func (c *Conn) recognised(string) reply {
	e := c.s.engine
	r, _ := one(e.Variable, e.Comment, e.Version, cmp.Or(e.Database, "shop"))
	return r
}

// shards tells the shards of Vitess.
func (c *Conn) shards(context.Context, string) (r reply, err error) {
	if c.s.engine.Shards == "" {
		return r, interrupted("no topology")
	}
	r.width = 1
	for shard := range strings.SplitSeq(c.s.engine.Shards, " ") {
		r.values = append(r.values, []driver.Value{shard})
	}
	return r, nil
}
