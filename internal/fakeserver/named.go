package fakeserver

import (
	"context"
	"database/sql/driver"
	"fmt"
	"regexp"
	"strconv"
	"strings"
)

// Drop ends the connections that hold a named lock, as KILL would: their holders have not
// been told yet.
func (s *Server) Drop() {
	s.mu.Lock()
	defer s.mu.Unlock()
	for _, n := range s.named {
		n.holder.lose()
	}
}

// Named counts the named locks that are held.
func (s *Server) Named() int {
	s.mu.Lock()
	defer s.mu.Unlock()
	return len(s.named)
}

// named is a named lock that is held.
type named struct {
	holder *Conn
	freed  chan struct{}
}

func (c *Conn) unname(name string) {
	close(c.s.named[name].freed)
	delete(c.s.named, name)
}

// nameHolder tells who holds the named lock in text.
func (c *Conn) nameHolder(text string) reply {
	n := c.s.named[first(usedName, text)]
	if n == nil {
		return reply{width: 4}
	}
	r, _ := one(n.holder.id, "", "", n.holder.owner)
	return r
}

var (
	tokens  = regexp.MustCompile(`\s*('[^']*'|<=>|@@\w+|[A-Za-z_]\w*|-?[0-9.]+|[(),?=])`)
	comment = regexp.MustCompile(`/\*.*?\*/ ?`)
)

// scalars evaluates expressions over named locks: what the statements of advisory locks,
// of wake-up locks and guards are made of. ok is false where there is anything else in text.
func (c *Conn) scalars(ctx context.Context, text string, args []driver.NamedValue) (values []driver.Value, ok bool, err error) {
	e := &expression{c: c, ctx: ctx, args: args}
	text = strings.ReplaceAll(strings.TrimSuffix(comment.ReplaceAllString(text, ""), " LIMIT 1"), "_utf8mb4'", "'")
	text = strings.ReplaceAll(text, "(SELECT 1 UNION ALL SELECT 2)", "STOP()")
	for rest := strings.TrimSpace(text); rest != ""; {
		m := tokens.FindStringSubmatchIndex(rest)
		if m == nil || m[0] != 0 {
			return nil, false, nil
		}
		e.tokens = append(e.tokens, rest[m[2]:m[3]])
		rest = strings.TrimSpace(rest[m[1]:])
	}
	for {
		values = append(values, e.or(true))
		if !e.take(",") {
			return values, !e.bad && len(e.tokens) == 0, e.err
		}
	}
}

// expression is what is still to be evaluated. With do false, a part is only passed over:
// the server evaluates only the branch of IF that it has chosen.
type expression struct {
	c      *Conn
	ctx    context.Context
	args   []driver.NamedValue
	tokens []string
	bad    bool
	err    error
}

func (e *expression) take(token string) bool {
	if len(e.tokens) == 0 || !strings.EqualFold(e.tokens[0], token) {
		return false
	}
	e.tokens = e.tokens[1:]
	return true
}

func (e *expression) expect(token string) { e.bad = !e.take(token) || e.bad }

func truth(v driver.Value) bool { return v != nil && fmt.Sprint(v) != "0" && fmt.Sprint(v) != "" }

func number(b bool) driver.Value {
	if b {
		return int64(1)
	}
	return int64(0)
}

func (e *expression) or(do bool) driver.Value {
	v := e.and(do)
	for e.take("OR") {
		right := e.and(do && !truth(v))
		v = number(truth(v) || truth(right))
	}
	return v
}

func (e *expression) and(do bool) driver.Value {
	v := e.compared(do)
	for e.take("AND") {
		right := e.compared(do && truth(v))
		v = number(truth(v) && truth(right))
	}
	return v
}

func (e *expression) compared(do bool) driver.Value {
	v := e.value(do)
	switch {
	case e.take("IS"):
		e.expect("NULL")
		return number(v == nil)
	case e.take("="), e.take("<=>"):
		right := e.value(do)
		return number(v != nil && right != nil && fmt.Sprint(v) == fmt.Sprint(right))
	}
	return v
}

func (e *expression) value(do bool) driver.Value {
	if len(e.tokens) == 0 || e.err != nil {
		e.bad = e.err == nil
		return nil
	}
	t := e.tokens[0]
	e.tokens = e.tokens[1:]
	switch {
	case t[0] == '\'':
		return strings.Trim(t, "'")
	case t == "?":
		v := e.args[0].Value
		e.args = e.args[1:]
		return v
	case t == "@@read_only", t == "@@innodb_read_only":
		return int64(0)
	case !e.take("("):
		n, err := strconv.ParseFloat(t, 64)
		e.bad = err != nil || e.bad
		return int64(n)
	}
	return e.call(t, do)
}

func (e *expression) call(name string, do bool) driver.Value {
	if name == "IF" {
		first := truth(e.or(do))
		e.expect(",")
		yes := e.or(do && first)
		e.expect(",")
		no := e.or(do && !first)
		e.expect(")")
		if first {
			return yes
		}
		return no
	}
	var args []driver.Value
	for !e.take(")") && !e.bad && e.err == nil {
		args = append(args, e.or(do))
		e.take(",")
	}
	if !do || e.bad || e.err != nil {
		return nil
	}
	return e.apply(name, args)
}

func (e *expression) apply(name string, args []driver.Value) driver.Value {
	if f, ok := functions[name]; ok {
		return f(e, args)
	}
	f, ok := ofNamedLocks[name]
	if !ok || len(args) == 0 {
		e.bad = true
		return nil
	}
	return f(e, fmt.Sprint(args[0]), args[1:])
}

// functions are those that are not about one named lock.
var functions = map[string]func(*expression, []driver.Value) driver.Value{
	"CONNECTION_ID": func(e *expression, _ []driver.Value) driver.Value { return e.c.id },
	"ROW_COUNT":     func(e *expression, _ []driver.Value) driver.Value { return e.c.rowCount },
	"STOP": func(e *expression, _ []driver.Value) driver.Value {
		e.err = stopped()
		return nil
	},
	"COALESCE": func(_ *expression, args []driver.Value) driver.Value {
		for _, v := range args {
			if v != nil {
				return v
			}
		}
		return nil
	},
	"CONCAT": func(_ *expression, args []driver.Value) driver.Value {
		var text strings.Builder
		for _, v := range args {
			fmt.Fprint(&text, v)
		}
		return text.String()
	},
	"RELEASE_ALL_LOCKS": func(e *expression, _ []driver.Value) driver.Value {
		for held, n := range e.c.s.named {
			if n.holder == e.c {
				e.c.unname(held)
			}
		}
		return int64(0)
	},
}

// ofNamedLocks are those about the lock that the first argument names.
var ofNamedLocks = map[string]func(e *expression, lock string, args []driver.Value) driver.Value{
	"IS_FREE_LOCK": func(e *expression, lock string, _ []driver.Value) driver.Value {
		return number(e.c.s.named[lock] == nil)
	},
	"IS_USED_LOCK": func(e *expression, lock string, _ []driver.Value) driver.Value {
		n := e.c.s.named[lock]
		if n == nil {
			return nil
		}
		return n.holder.id
	},
	"RELEASE_LOCK": func(e *expression, lock string, _ []driver.Value) driver.Value {
		switch n := e.c.s.named[lock]; {
		case n == nil:
			return nil
		case n.holder != e.c:
			return int64(0)
		}
		e.c.unname(lock)
		return int64(1)
	},
	"GET_LOCK": (*expression).getLock,
}

// getLock takes a named lock, and waits for it unless the argument is 0.
func (e *expression) getLock(lock string, args []driver.Value) driver.Value {
	held := e.c.s.named
	for n := held[lock]; n != nil && n.holder != e.c; n = held[lock] {
		if fmt.Sprint(args[0]) == "0" {
			return int64(0)
		}
		if e.err = e.c.await(e.ctx, n.freed); e.err != nil {
			return nil
		}
	}
	if held[lock] == nil {
		held[lock] = &named{e.c, make(chan struct{})}
	}
	return int64(1)
}
